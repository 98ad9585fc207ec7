"""The kernels of the delta rule: the solution of the system of a chunk, and its gradient, see `delta.py`.

Log decays are sums of two float32 numbers, `high` and `low`, relative to the start of a chunk. The difference of two of
them keeps its digits behind a gate that has decayed everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sympow.ops.triton.primitives import power as power_of

_VANISHED = tl.constexpr(150.0)  # -log2 of a decay that is 0 in float32


@triton.jit
def _rows_of(k, beta, start, first, T, G, g, K: tl.constexpr, ROWS: tl.constexpr):
    """Returns keys [ROWS, K] and beta [ROWS] of ROWS tokens of a head; zeros behind the end of the row."""
    t = tl.arange(0, ROWS)
    valid = first + t < T
    token = (start + first + t) * G + g
    x = tl.load(k + token[:, None] * K + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0)
    return x, tl.load(beta + token, mask=valid, other=0.0)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Returns a b for float32 matrices."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _parts(x):
    """Returns a float32 x as the sum of two bfloat16 numbers, with 16 of its digits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _add_product(acc, a, b, FULL: tl.constexpr):
    """Returns acc + a b for float32 matrices: with FULL "bf16x3" by three products of `_parts`, whose errors are below
    2**-16 of their terms."""
    if FULL == "bf16x3":
        b_high, b_low = _parts(b)
        return _add_product_of_parts(acc, a, b_high, b_low, FULL)
    else:
        return tl.dot(a, b, acc, input_precision=FULL)


@triton.jit
def _add_product_of_parts(acc, a, b_high, b_low, FULL: tl.constexpr):
    """Returns acc + a b, where b is the sum of its `_parts` with FULL "bf16x3", and otherwise b_high."""
    if FULL == "bf16x3":
        a_high, a_low = _parts(a)
        acc = tl.dot(a_low, b_high, acc)
        acc = tl.dot(a_high, b_low, acc)
        return tl.dot(a_high, b_high, acc)
    else:
        return tl.dot(a, b_high, acc, input_precision=FULL)


@triton.jit
def _system(x, y, P: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (x_i . y_j)**P."""
    return power_of(tl.dot(x, tl.trans(y), input_precision=PRECISION), P)


@triton.jit
def _own_corrections(x, b, P: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns N of (I + M B) N = M for M = tril((x_i . x_j)**P, -1) and B = diag(b), by substitution: [ROWS, ROWS]."""
    t = tl.arange(0, ROWS)
    rows, cols = t[:, None], t[None, :]
    scores = _system(x, x, P, PRECISION)
    system = tl.where(rows < cols, scores * b[:, None], 0.0)  # M B transposed: [j, i]
    found = tl.where(rows > cols, scores, 0.0)
    for i in range(1, ROWS):
        a = tl.sum(tl.where(cols == i, system, 0.0), 1)  # the entries of row i, by j
        found -= tl.where(rows == i, tl.sum(a[:, None] * found, 0)[None, :], 0.0)
    return found


@triton.jit
def _joined(rest, own, b, PRECISION: tl.constexpr):
    """Returns the solution N of (I + M B) N = rest, where `own` is that for M on the right-hand side."""
    return rest - _product(own, rest * b[:, None], PRECISION)


@triton.jit
def _pair(own, other):
    """Returns the place of block `own` of tokens and the block `other`, which is not later, among those of a group."""
    return own * (own + 1) // 2 + other


@triton.jit
def block_corrections(
    k, beta, out, T, begin, count, size, room, G,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Computes N of (I + M B) N = M for `count` blocks of tokens of each row, from token `begin` on, without gates.

    M = tril((k_i . k_j)**P, -1) and B = diag(beta). So (I + M B)^-1 = I - N B and (I + B M)^-1 = I - B N, of which the
    forward and the backward need one each. k is [B, T, G, K] and beta [B, T, G]. out is float32 [B, room, G, pairs,
    BLOCK, BLOCK] for groups of BLOCKS blocks, which begin anew with every chunk of `size` blocks. A block is the pair
    of itself (`_pair`). Grid: blocks of all rows, G.

    The block has four parts, whose products have the precision FULL; N_ba for parts b > a solves (I + M_bb B_b) N_ba =
    M_ba - sum_{a<=c<b} M_bc B_c N_ca.
    """
    g = tl.program_id(1)
    block = tl.program_id(0) % count
    row = tl.program_id(0) // count
    first = begin + block * BLOCK
    start = tl.cast(row, tl.int64) * T
    N: tl.constexpr = BLOCK // 4
    x0, b0 = _rows_of(k, beta, start, first, T, G, g, K, N)
    x1, b1 = _rows_of(k, beta, start, first + N, T, G, g, K, N)
    x2, b2 = _rows_of(k, beta, start, first + 2 * N, T, G, g, K, N)
    x3, b3 = _rows_of(k, beta, start, first + 3 * N, T, G, g, K, N)
    n00 = _own_corrections(x0, b0, P, N, PRECISION)
    n11 = _own_corrections(x1, b1, P, N, PRECISION)
    n22 = _own_corrections(x2, b2, P, N, PRECISION)
    n33 = _own_corrections(x3, b3, P, N, PRECISION)
    m10 = _system(x1, x0, P, PRECISION)
    m21 = _system(x2, x1, P, PRECISION)
    m32 = _system(x3, x2, P, PRECISION)
    m20 = _system(x2, x0, P, PRECISION)
    m31 = _system(x3, x1, P, PRECISION)
    rest = m10 - _product(m10, b0[:, None] * n00, FULL)
    n10 = _joined(rest, n11, b1, FULL)
    rest = m21 - _product(m21, b1[:, None] * n11, FULL)
    n21 = _joined(rest, n22, b2, FULL)
    rest = m32 - _product(m32, b2[:, None] * n22, FULL)
    n32 = _joined(rest, n33, b3, FULL)
    rest = m20 - _product(m20, b0[:, None] * n00, FULL) - _product(m21, b1[:, None] * n10, FULL)
    n20 = _joined(rest, n22, b2, FULL)
    rest = m31 - _product(m31, b1[:, None] * n11, FULL) - _product(m32, b2[:, None] * n21, FULL)
    n31 = _joined(rest, n33, b3, FULL)
    rest = _system(x3, x0, P, PRECISION)
    rest -= _product(rest, b0[:, None] * n00, FULL)
    rest -= _product(m31, b1[:, None] * n10, FULL) + _product(m32, b2[:, None] * n20, FULL)
    n30 = _joined(rest, n33, b3, FULL)
    t = tl.arange(0, N)
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    own = block % size % BLOCKS
    group = block // size * tl.cdiv(size, BLOCKS) + block % size // BLOCKS
    at = ((tl.cast(row, tl.int64) * room + group) * G + g) * PAIRS + _pair(own, own)
    base = out + at * (BLOCK * BLOCK) + t[:, None] * BLOCK + t[None, :]
    zero = n00 * 0.0
    tl.store(base, n00)
    tl.store(base + N, zero)
    tl.store(base + 2 * N, zero)
    tl.store(base + 3 * N, zero)
    tl.store(base + N * BLOCK, n10)
    tl.store(base + N * BLOCK + N, n11)
    tl.store(base + N * BLOCK + 2 * N, zero)
    tl.store(base + N * BLOCK + 3 * N, zero)
    tl.store(base + 2 * N * BLOCK, n20)
    tl.store(base + 2 * N * BLOCK + N, n21)
    tl.store(base + 2 * N * BLOCK + 2 * N, n22)
    tl.store(base + 2 * N * BLOCK + 3 * N, zero)
    tl.store(base + 3 * N * BLOCK, n30)
    tl.store(base + 3 * N * BLOCK + N, n31)
    tl.store(base + 3 * N * BLOCK + 2 * N, n32)
    tl.store(base + 3 * N * BLOCK + 3 * N, n33)


@triton.jit
def group_corrections(
    k, beta, out, T, begin, groups, size, room, G,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of different blocks to `out`, in which `block_corrections` has written those of each block: N of
    (I + M B) N = M for whole groups of BLOCKS blocks, `groups` of each row, by the same formula. Grid: groups of all
    rows, G.

    Blocks behind the end of a chunk have keys of zeros, so their N are zeros.
    """
    g = tl.program_id(1)
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups
    chunk = group // tl.cdiv(size, BLOCKS)
    first = begin + (chunk * size + group % tl.cdiv(size, BLOCKS) * BLOCKS) * BLOCK
    end = tl.minimum(begin + (chunk + 1) * size * BLOCK, T)
    start = tl.cast(row, tl.int64) * T
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    t = tl.arange(0, BLOCK)
    place = t[:, None] * BLOCK + t[None, :]
    base = out + ((tl.cast(row, tl.int64) * room + group) * G + g) * (PAIRS * BLOCK * BLOCK) + place
    for a in tl.static_range(BLOCKS - 1):
        x, scale = _rows_of(k, beta, start, first + a * BLOCK, end, G, g, K, BLOCK)
        there = first + a * BLOCK + t < end
        n = tl.load(base + _pair(a, a) * (BLOCK * BLOCK), mask=there[:, None], other=0.0)
        columns = (n * scale[:, None],)  # N_ca for c from a on, each times beta of its rows
        xs = (x,)
        for b in tl.static_range(a + 1, BLOCKS):
            x, scale = _rows_of(k, beta, start, first + b * BLOCK, end, G, g, K, BLOCK)
            there = first + b * BLOCK + t < end
            rest = _system(x, xs[0], P, PRECISION)
            for c in tl.static_range(b - a):
                rest = _add_product(rest, -_system(x, xs[c], P, PRECISION), columns[c], FULL)
            own = tl.load(base + _pair(b, b) * (BLOCK * BLOCK), mask=there[:, None], other=0.0)
            n = _add_product(rest, -own, rest * scale[:, None], FULL)
            tl.store(base + _pair(b, a) * (BLOCK * BLOCK), n)
            columns += (n * scale[:, None],)
            xs += (x,)


@triton.jit
def _log_decay(high, low, early, late):
    """Returns log2 of the decay from tokens `early` to tokens `late` of the chunk, at most 0."""
    rest = tl.load(low + late) - tl.load(low + early)
    return tl.minimum((tl.load(high + late) - tl.load(high + early)) + rest, 0.0)


@triton.jit
def _decay(high_early, low_early, high_late, low_late):
    """Returns the decay between tokens with these log decays; 1 where the first is the later one."""
    return tl.exp2(tl.minimum((high_late - high_early) + (low_late - low_early), 0.0))


@triton.jit
def _source(
    source, read, high, low, n, t, row, local, count, G, c, V: tl.constexpr, GATED: tl.constexpr, LATER: tl.constexpr
):
    """Returns channels c of what tokens n + t [ROWS] of a chunk start from: source, less `read` times a decay.

    source is [B, T, G, V], in which token n of the head is row `row`. `read`, None or float32 [B, count, G, V], in
    which token n is row `local`, is what the state before the chunk returns. If LATER, it is what the negative of the
    gradient of the state behind the chunk gives.
    """
    valid = n + t < count
    mask = valid[:, None] & (c < V)
    place = t[:, None] * (G * V) + c
    acc = tl.load(source + row * V + place, mask=mask, other=0.0).to(tl.float32)
    if read is not None:
        x = tl.load(read + local * V + place, mask=mask, other=0.0)
        if GATED:
            high_n = tl.load(high + n + t, mask=valid, other=0.0)
            low_n = tl.load(low + n + t, mask=valid, other=0.0)
            if LATER:
                x *= _decay(high_n, low_n, tl.load(high + count - 1), tl.load(low + count - 1))[:, None]
            else:
                x *= _decay(0.0, 0.0, high_n, low_n)[:, None]
        acc -= x
    return acc


@triton.jit
def _near_end(j, count, SPAN: tl.constexpr, LATER: tl.constexpr):
    """Returns the last token of the group of token j, or its first one if LATER; the last of all for later tokens."""
    if LATER:
        return tl.minimum(j // SPAN * SPAN, count - 1)
    else:
        return tl.minimum(j // SPAN * SPAN + (SPAN - 1), count - 1)


@triton.jit
def _from_groups(
    k, source, read, high, low, faded, target, n, T, count, group, b, g, G, c,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, LATER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what `groups_pass` does, for channels c and the ROWS tokens from token n of the chunk on."""
    start = b * T
    t = tl.arange(0, ROWS)
    s = tl.arange(0, STEP)[:, None]
    channel = tl.arange(0, K)[None, :]
    valid = n + t < count
    row = (start + n) * G + g
    x = tl.load(k + row * K + (t[:, None] * (G * K) + channel), mask=valid[:, None], other=0.0)
    groups = tl.cdiv(count, SPAN)
    faded += (b * G + g) * groups * (SPAN * COLUMNS)
    begin = group * 0
    end = group // SPAN
    if LATER:
        begin = end + 1
        end = groups
    if GATED:
        # From j to i everything decays in three parts: from j to the end of its group, then to the first token of the
        # group of i, then to i. The second part is one number for two groups. If LATER, the other way round.
        border = group
        if LATER:
            border = tl.minimum(group + (SPAN - 1), count - 1)
        gone = group * 0  # groups of which nothing is left at the border
        for i in range(begin, end, 32):
            other = i + tl.arange(0, 32)
            if LATER:
                far = _log_decay(high, low, border, tl.minimum(other * SPAN, count - 1))
            else:
                far = _log_decay(high, low, tl.minimum(other * SPAN + SPAN - 1, border), border)
            gone += tl.sum(((far < -_VANISHED) & (other < end)).to(tl.int32), 0)
        if LATER:
            end -= gone
        else:
            begin += gone
        high_b = tl.load(high + border)
        low_b = tl.load(low + border)
        near = _near_end(begin * SPAN, count, SPAN, LATER)
        high_j = tl.load(high + near)
        low_j = tl.load(low + near)
    acc = tl.zeros([ROWS, c.shape[1]], tl.float32)
    for j in tl.range(begin * SPAN, tl.minimum(end * SPAN, count), STEP, num_stages=STAGES):
        keys = k + ((start + j) * G + g) * K + (s * (G * K) + channel)
        if LATER:
            y = tl.load(keys, mask=j + s < count, other=0.0)
        else:
            y = tl.load(keys)
        u = tl.load(faded + tl.cast(j, tl.int64) * COLUMNS + (s * COLUMNS + c))
        w = power_of(tl.dot(x, tl.trans(y), input_precision=PRECISION), P)
        if GATED:
            if LATER:
                w *= _decay(high_b, low_b, high_j, low_j)
            else:
                w *= _decay(high_j, low_j, high_b, low_b)
            near = _near_end(j + STEP, count, SPAN, LATER)  # of the next iteration, which need not wait for the loads
            high_j = tl.load(high + near)
            low_j = tl.load(low + near)
        acc = tl.dot(w.to(u.dtype), u, acc, input_precision=PRECISION)
    if GATED:
        high_n = tl.load(high + n + t, mask=valid, other=0.0)
        low_n = tl.load(low + n + t, mask=valid, other=0.0)
        if LATER:
            acc *= _decay(high_n, low_n, high_b, low_b)[:, None]
        else:
            acc *= _decay(high_b, low_b, high_n, low_n)[:, None]
    local = (b * count + n) * G + g
    acc = _source(source, read, high, low, n, t, row, local, count, G, c, V, GATED, LATER) - acc
    target += ((b * G + g) * SPAN + n - group) * COLUMNS
    tl.store(target + (t[:, None] * COLUMNS + c), acc)


@triton.jit
def groups_pass(
    k, source, read, sums, faded, target, T, count, group, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, LATER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes target, float32 [B, G, SPAN, COLUMNS], for the group of SPAN tokens that begins at token `group`.

    That is what `_source` returns, less what the updates of earlier groups return; if LATER, less what the gradients of
    the values of later groups say of the updates. Tensors of all tokens begin with the chunk, which has `count` tokens.
    faded [B, G, groups SPAN, COLUMNS] has these updates, decayed to the end of their own group, or these gradients,
    decayed to the start of it. Grid: tiles of ROWS tokens of the group, rows, G.
    """
    b = tl.cast(tl.program_id(1), tl.int64)
    g = tl.cast(tl.program_id(2), tl.int64)
    high = sums
    low = sums
    if GATED:
        batch = tl.cast(tl.num_programs(1), tl.int64)
        high += g * batch * T + b * T
        low = high + G * batch * T
    c = tl.arange(0, COLUMNS)[None, :]
    n = group + tl.program_id(0) * ROWS
    _from_groups(
        k, source, read, high, low, faded, target, n, T, count, group, b, g, G, c,
        K, V, COLUMNS, P, SPAN, ROWS, STEP, STAGES, GATED, LATER, PRECISION,
    )  # fmt: skip


@triton.jit
def _keep_parts(seen, x, at, plane, FULL: tl.constexpr):
    """Writes the `_parts` of x to two planes of `seen`, or x if products need no parts."""
    if FULL == "bf16x3":
        x_high, x_low = _parts(x)
        tl.store(seen + at, x_high)
        tl.store(seen + plane + at, x_low)
    else:
        tl.store(seen + at, x)


@triton.jit
def _kept_parts(seen, at, plane, FULL: tl.constexpr):
    """Returns what `_keep_parts` has written."""
    if FULL == "bf16x3":
        return tl.load(seen + at), tl.load(seen + plane + at)
    else:
        x = tl.load(seen + at)
        return x, x


@triton.jit
def _solve_group(
    beta, source, read, target, seen, high, low, corrections, errors, update, recent, faded, dbeta, T, count, room,
    group, b, g, G, c, plane,
    V: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    GATED: tl.constexpr, LATER: tl.constexpr, ALONE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Solves one group for channels c, see `solve_pass`. ALONE: the group starts from what `_source` returns; otherwise
    from target, see `groups_pass`. `seen` has planes of `plane` numbers."""
    t = tl.arange(0, BLOCK)
    BLOCKS: tl.constexpr = SPAN // BLOCK
    PAIRS: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    last = tl.minimum(group + SPAN, count) - 1
    own = (b * G + g) * (SPAN * COLUMNS) + (t[:, None] * COLUMNS + c)
    # What other blocks read of a block is its start times beta, decayed to its end on their side.
    for m in tl.static_range(BLOCKS):
        n = group + m * BLOCK
        valid = n + t < count
        row = (b * T + n) * G + g
        at = own + m * (BLOCK * COLUMNS)
        if ALONE:
            local = (b * count + n) * G + g
            x = _source(source, read, high, low, n, t, row, local, count, G, c, V, GATED, LATER)
            tl.store(target + at, x)
        else:
            x = tl.load(target + at)
        x *= tl.load(beta + row + t * G, mask=valid, other=0.0)[:, None]
        if GATED:
            front = tl.minimum(n, count - 1)
            back = tl.minimum(front + BLOCK, count) - 1
            high_n = tl.load(high + n + t, mask=valid, other=0.0)
            low_n = tl.load(low + n + t, mask=valid, other=0.0)
            if LATER:
                x *= _decay(tl.load(high + front), tl.load(low + front), high_n, low_n)[:, None]
            else:
                x *= _decay(high_n, low_n, tl.load(high + back), tl.load(low + back))[:, None]
        _keep_parts(seen, x, at, plane, FULL)
    tl.debug_barrier()  # other threads have written what is read now
    here = t[:, None] * BLOCK + t[None, :]
    pairs = corrections + ((b * room + group // SPAN) * G + g) * (PAIRS * BLOCK * BLOCK)
    for m in tl.static_range(BLOCKS):
        n = group + m * BLOCK
        valid = n + t < count
        row = (b * T + n) * G + g
        mask = valid[:, None] & (c < V)
        place = t[:, None] * (G * V) + c
        # Everything decays from j to i in three parts, as in `groups_pass`, here from block to block.
        front = tl.minimum(n, count - 1)
        back = tl.minimum(front + BLOCK, count) - 1
        acc = tl.zeros([BLOCK, c.shape[1]], tl.float32)
        for i in tl.static_range(BLOCKS - 1 - m if LATER else m):
            j = m + 1 + i if LATER else i
            pair = _pair(j, m) if LATER else _pair(m, j)
            first = group + (m + 1 + i if LATER else m) * BLOCK
            r = tl.load(pairs + pair * (BLOCK * BLOCK) + here, mask=(first + t < count)[:, None], other=0.0)
            if LATER:
                r = tl.trans(r)
            between = -1.0
            if GATED:
                other = tl.minimum(group + j * BLOCK, count - 1)
                if LATER:
                    between = -tl.exp2(_log_decay(high, low, back, other))
                else:
                    other = tl.minimum(other + BLOCK, count) - 1
                    between = -tl.exp2(_log_decay(high, low, other, front))
            x_high, x_low = _kept_parts(seen, own + j * (BLOCK * COLUMNS), plane, FULL)
            acc = _add_product_of_parts(acc, r * between, x_high, x_low, FULL)
        r = tl.load(pairs + _pair(m, m) * (BLOCK * BLOCK) + here, mask=valid[:, None], other=0.0)
        if LATER:
            r = tl.trans(r)
        if GATED:
            high_n = tl.load(high + n + t, mask=valid, other=0.0)
            low_n = tl.load(low + n + t, mask=valid, other=0.0)
            if LATER:
                acc *= _decay(high_n, low_n, tl.load(high + back), tl.load(low + back))[:, None]
                r *= _decay(high_n[:, None], low_n[:, None], high_n[None, :], low_n[None, :])
            else:
                acc *= _decay(tl.load(high + front), tl.load(low + front), high_n, low_n)[:, None]
                r *= _decay(high_n[None, :], low_n[None, :], high_n[:, None], low_n[:, None])
        scale = tl.load(beta + row + t * G, mask=valid, other=0.0)
        x = tl.load(target + own + m * (BLOCK * COLUMNS))
        acc = _add_product(acc + x, -r, x * scale[:, None], FULL)
        u = acc * scale[:, None]
        if LATER:
            error = tl.load(errors + row * V + place, mask=mask, other=0.0)
            at = ((b * tl.num_programs(2) + tl.program_id(2)) * T + n) * G + g
            tl.store(dbeta + at + t * G, tl.sum(acc * error.to(tl.float32), 1), mask=valid)
        else:
            tl.store(errors + row * V + place, acc.to(errors.dtype.element_ty), mask=mask)
        tl.store(update + row * V + place, u.to(update.dtype.element_ty), mask=mask)
        if recent is not None:
            local = (b * count + n) * G + g
            tl.store(recent + local * V + place, u.to(recent.dtype.element_ty), mask=mask)
        if faded is not None:
            if GATED:
                if LATER:
                    u *= _decay(tl.load(high + group), tl.load(low + group), high_n, low_n)[:, None]
                else:
                    u *= _decay(high_n, low_n, tl.load(high + last), tl.load(low + last))[:, None]
            at = ((b * G + g) * tl.cdiv(count, SPAN) * SPAN + n) * COLUMNS
            tl.store(faded + at + (t[:, None] * COLUMNS + c), u.to(faded.dtype.element_ty))


@triton.jit
def solve_pass(
    k, beta, source, read, target, seen, sums, corrections, errors, update, recent, faded, dbeta, T, count, room,
    group, groups, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    LATER: tl.constexpr, ALONE: tl.constexpr, JOINED: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Computes errors and update = beta errors, [B, T, G, V], for groups of SPAN tokens, the first of which begins at
    `group`: one group, or if JOINED all `groups` of the chunk one after another, the last one first if LATER.

    If LATER, it computes the gradients of the values, in place of update, and the part of each program in dbeta,
    [B, parts, T, G], given the errors. ALONE: no other group comes before in the solution, and the group starts from
    what `_source` returns; otherwise from target, see `groups_pass`, whose work the program does itself if JOINED. If
    they are not None, `recent` [B, count, G, V] gets a copy of update, and faded what `groups_pass` reads of it.
    Tensors begin with the chunk, as in that pass. Grid: rows, G, parts of WIDTH channels.

    corrections has N for whole groups, see `group_corrections`, `room` groups for each row. So the blocks of a group do
    not wait for one another: errors are s - (N * D) (beta s), where s is what the group starts from and D has decays.
    """
    b = tl.cast(tl.program_id(0), tl.int64)
    g = tl.cast(tl.program_id(1), tl.int64)
    high = sums
    low = sums
    if GATED:
        batch = tl.cast(tl.num_programs(0), tl.int64)
        high += g * batch * T + b * T
        low = high + G * batch * T
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
    plane = tl.cast(tl.num_programs(0), tl.int64) * G * (SPAN * COLUMNS)
    if JOINED:
        for i in tl.range(groups, disable_licm=True):
            here = group + i * SPAN
            if LATER:
                here = group - i * SPAN
            for n in tl.range(here, here + SPAN, ROWS, disable_licm=True):
                _from_groups(
                    k, source, read, high, low, faded, target, n, T, count, here, b, g, G, c,
                    K, V, COLUMNS, P, SPAN, ROWS, STEP, STAGES, GATED, LATER, PRECISION,
                )  # fmt: skip
            tl.debug_barrier()  # other threads have written what is read now
            _solve_group(
                beta, source, read, target, seen, high, low, corrections, errors, update, recent, faded, dbeta, T,
                count, room, here, b, g, G, c, plane, V, COLUMNS, BLOCK, SPAN, GATED, LATER, False, FULL,
            )  # fmt: skip
            tl.debug_barrier()
    else:
        _solve_group(
            beta, source, read, target, seen, high, low, corrections, errors, update, recent, faded, dbeta, T,
            count, room, group, b, g, G, c, plane, V, COLUMNS, BLOCK, SPAN, GATED, LATER, ALONE, FULL,
        )  # fmt: skip


@triton.jit
def key_gradient_pass(
    k, u, dv, first, second, third, out, count,
    K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes out [count, K]: first - second - third + 2 P (k . k)**(P - 1) (dv . u) k, for k [count, K] and u and dv
    [count, V]. Grid: blocks of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    there, mask = row * V + c, (row < count) & (c < V)
    own = tl.load(u + there, mask=mask, other=0.0).to(tl.float32)
    own = tl.sum(own * tl.load(dv + there, mask=mask, other=0.0).to(tl.float32), 1)
    c = tl.arange(0, CHANNELS)[None, :]
    here, mask = row * K + c, (row < count) & (c < K)
    x = tl.load(k + here, mask=mask, other=0.0).to(tl.float32)
    if P > 1:
        own *= power_of(tl.sum(x * x, 1), P - 1)
    acc = 2 * P * own[:, None] * x
    acc += tl.load(first + here, mask=mask, other=0.0).to(tl.float32)
    acc -= tl.load(second + here, mask=mask, other=0.0).to(tl.float32)
    acc -= tl.load(third + here, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + here, acc.to(out.dtype.element_ty), mask=mask)
