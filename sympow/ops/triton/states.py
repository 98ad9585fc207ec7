"""The states at the boundaries of chunks: forward in time for keys and values, in reverse for queries and output
gradients.

A state is S = sum_t w_t row(x_t) y_t^T over the tokens of a chunk and, with decay, of all chunks before (after, in
reverse). There are three kernels. The first computes the running sums of the gate within each chunk. The second
transposes and weights the keys (queries), so that a tile of rows is two loads and a product. The third is the pass
itself: a program has some rows of the state of one head in float32 registers, and processes the tokens in order.
"""

import triton
import triton.language as tl

from sympow.ops.triton.gate import REACH_TILE
from sympow.ops.triton.primitives import aligned, first_state, locate, rounded


@triton.jit
def weigh(
    x, x_st, x_sh, sums, norm, delta, out, starts, blocks, T, tokens, stride, R, weight,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GATED: tl.constexpr, TILED: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes out [heads, K + 1 (2K + 1 if P > 2), stride]: x transposed, with tokens last. Sequences are padded with
    zeros.

    Rows 0 to K - 1 are weighted by w_t, row K is the weight of the normalizer's state, and the rows from K + 1 on are x
    itself. In the forward w_t = 2**(L_end - L_t). In reverse w_t = weight 2**L_t norm_t, and row K is -delta_t w_t.
    """
    n, start, length, first = locate(tl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    if PACKED:
        if first >= length:
            return
    h = tl.cast(tl.program_id(1), tl.int64)
    heads = tl.cast(tl.num_programs(1) // R, tl.int64)  # key/value heads
    t = first + tl.arange(0, BLOCK)
    valid = t < length
    k = tl.arange(0, K)
    tile = x + (start + first) * x_st + h * x_sh + (tl.arange(0, BLOCK)[:, None] * x_st + k[None, :])
    tile = tl.load(tile, mask=valid[:, None], other=0.0)
    w = tl.where(valid, 1.0, 0.0)
    if GATED:
        here = sums + (h // R) * tokens + start
        at = t
        if TILED:
            here += heads * tokens
            at = first + tl.arange(0, BLOCK) // REACH_TILE * REACH_TILE  # the high part of a tile is read once
        low = here + heads * tokens
        high = tl.load(here + at, mask=valid, other=0.0)
        rest = tl.load(low + t, mask=valid, other=0.0)
        if REVERSE:
            w *= tl.exp2(high + rest)
        else:
            last = tl.minimum((first // CHUNK) * CHUNK + CHUNK, length) - 1
            w *= tl.exp2((tl.load(here + last) - high) + (tl.load(low + last) - rest))
    z = w
    if REVERSE:
        w *= weight * tl.load(norm + h * tokens + start + t, mask=valid, other=0.0)
        z = w
        if P > 1:  # for p = 1 the row is that of the empty product
            z = -w * tl.load(delta + h * tokens + start + t, mask=valid, other=0.0)
    rows = out + h * ((2 * K + 1 if P > 2 else K + 1) * stride) + aligned(start, n, BLOCK) + t
    weighted = (tile.to(tl.float32) * w[:, None]).to(tile.dtype)
    tl.store(rows[None, :] + k[:, None] * stride, tl.trans(weighted))
    tl.store(rows + K * stride, z.to(tile.dtype))
    if P > 2:
        tl.store(rows[None, :] + (K + 1 + k[:, None]) * stride, tl.trans(tile))


@triton.jit
def _factor(xt, stride, t, valid, i, count, prefixes, K: tl.constexpr, P: tl.constexpr):
    """Returns the weighted product of the entries of prefix i for tokens t, [STEP]."""
    here = tl.where(i < count, valid, False)  # the interpreter of Triton 3.9 takes no valid & (i < count)
    if P == 1:  # the empty product
        return tl.load(xt + K * stride + t, mask=here, other=0.0)
    elif P == 2:
        return tl.load(xt + i * stride + t, mask=here, other=0.0)
    else:
        i = tl.minimum(i, count - 1)
        first = tl.load(xt + tl.load(prefixes + i * (P - 1)) * stride + t, mask=here, other=0.0)
        factor = first.to(tl.float32)
        for m in tl.static_range(1, P - 1):
            row = K + 1 + tl.load(prefixes + i * (P - 1) + m)
            factor = factor * tl.load(xt + row * stride + t, mask=here, other=0.0).to(tl.float32)
        return factor


@triton.jit
def _rows(x, xt, stride, t, valid, i, count, sub, prefixes, K: tl.constexpr, P: tl.constexpr, PREFIXES: tl.constexpr):
    """Returns the tile [rows, STEP] of PREFIXES prefixes from i on times x [rows, STEP]; `sub` [rows] is the prefix of
    each row."""
    f = _factor(xt, stride, t, valid, i, count, prefixes, K, P)[None, :]
    for u in tl.static_range(1, PREFIXES):
        f = tl.where(sub[:, None] == u, _factor(xt, stride, t, valid, i + u, count, prefixes, K, P)[None, :], f)
    return (x * f).to(x.dtype)


@triton.jit
def _write(out, acc, i, count, sub, j, col, columns, WIDTH: tl.constexpr):
    """Returns the indices of rows of a state: prefix i + sub, last index j, WIDTH rows for each prefix."""
    ptrs = out + (((i + sub) * WIDTH + j) * columns)[:, None] + col[None, :]
    tl.store(ptrs, acc.to(out.dtype.element_ty), mask=((i + sub) < count)[:, None] & (col < columns)[None, :])


@triton.jit
def _read(ptr, i, count, sub, j, col, columns, WIDTH: tl.constexpr):
    ptrs = ptr + (((i + sub) * WIDTH + j) * columns)[:, None] + col[None, :]
    return tl.load(ptrs, mask=((i + sub) < count)[:, None] & (col < columns)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _product(ptr, acc, i, count, sub, j, col, columns, WIDTH: tl.constexpr, ALONE: tl.constexpr):
    """Returns the part of these rows, `acc`, in the inner product of their state with the one at ptr, a scalar. From
    the last index ALONE on, a row counts for both orderings.

    `acc` is rounded as it is when it is written. The key pass reads the rounded state, so the same rounding errors are
    in both, and cancel in the gradient of the gate.
    """
    own = acc.to(ptr.dtype.element_ty).to(tl.float32)
    x = tl.sum(_read(ptr, i, count, sub, j, col, columns, WIDTH) * own, 1)
    return tl.sum(x * tl.where(j < ALONE, 1.0, 2.0), 0)


@triton.jit
def _walk(
    x, x_st, x_sh, xt, xt_sh, stride, y, y_st, y_sh, sums, out, out_step, init, final, other, products,
    products_step, prefixes, i, count, start, length, chunks, columns,
    J0: tl.constexpr, WIDTH: tl.constexpr, ALONE: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr,
    TILES: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, REVERSE: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Computes the rows of TILES tiles, from prefix i on, through all chunks of a sequence. Pointers are to its first
    token, chunk and head. `count` is the end of the prefixes, `columns` the end of the columns; `other` is part of
    s_forward or z_forward of `state_pass`."""
    PREFIXES: tl.constexpr = 64 // WIDTH if WIDTH < 64 else 1  # a product has at least 64 rows
    M: tl.constexpr = PREFIXES * WIDTH
    m = tl.arange(0, M)
    j = m % WIDTH
    sub = m // WIDTH
    col = tl.arange(0, COLUMNS)
    t = tl.arange(0, STEP)
    steps: tl.constexpr = CHUNK // STEP
    x_tile = t[:, None] * x_st + (J0 + j)[None, :]
    y_tile = t[:, None] * y_st + col[None, :]
    a0 = tl.zeros([M, COLUMNS], tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    if INIT:
        a0 = _read(init, i, count, sub, j, col, columns, WIDTH)
        if TILES > 1:
            a1 = _read(init, i + PREFIXES, count, sub, j, col, columns, WIDTH)
        if TILES > 2:
            a2 = _read(init, i + 2 * PREFIXES, count, sub, j, col, columns, WIDTH)
            a3 = _read(init, i + 3 * PREFIXES, count, sub, j, col, columns, WIDTH)
    for it in range(chunks * (R * steps)):
        within = it % (R * steps)
        chunk = it // (R * steps)
        if REVERSE:
            chunk = chunks - 1 - chunk
        if within == 0:
            here = out + tl.cast(chunk, tl.int64) * out_step
            b0 = rounded(a0, PRECISION)
            b1 = rounded(a1, PRECISION)
            b2 = rounded(a2, PRECISION)
            b3 = rounded(a3, PRECISION)
            if products is not None:
                if it > 0:
                    there = other + tl.cast(chunk, tl.int64) * out_step
                    product = _product(there, b0, i, count, sub, j, col, columns, WIDTH, ALONE)
                    if TILES > 1:
                        product += _product(there, b1, i + PREFIXES, count, sub, j, col, columns, WIDTH, ALONE)
                    if TILES > 2:
                        product += _product(there, b2, i + 2 * PREFIXES, count, sub, j, col, columns, WIDTH, ALONE)
                        product += _product(there, b3, i + 3 * PREFIXES, count, sub, j, col, columns, WIDTH, ALONE)
                    tl.store(products + tl.cast(chunk, tl.int64) * products_step, product)
                tl.debug_barrier()  # `other` may be `out`: other threads have read what is overwritten now
            if not AFTER:
                _write(here, b0, i, count, sub, j, col, columns, WIDTH)
                if TILES > 1:
                    _write(here, b1, i + PREFIXES, count, sub, j, col, columns, WIDTH)
                if TILES > 2:
                    _write(here, b2, i + 2 * PREFIXES, count, sub, j, col, columns, WIDTH)
                    _write(here, b3, i + 3 * PREFIXES, count, sub, j, col, columns, WIDTH)
            if GATED:
                decay = tl.exp2(tl.load(sums + tl.minimum((chunk + 1) * CHUNK, length) - 1))
                a0 *= decay
                if TILES > 1:
                    a1 *= decay
                if TILES > 2:
                    a2 *= decay
                    a3 *= decay
        r = tl.cast(within // steps, tl.int64)  # heads may be far apart
        s = chunk * CHUNK + (within % steps) * STEP
        valid = s + t < length
        xs = tl.load(x + (tl.cast(s, tl.int64) * x_st + r * x_sh) + x_tile, mask=valid[:, None], other=0.0)
        ys_ptrs = y + (tl.cast(s, tl.int64) * y_st + r * y_sh) + y_tile
        ys = tl.load(ys_ptrs, mask=valid[:, None] & (col < columns)[None, :], other=0.0)
        factors = xt + r * xt_sh + s
        xs = tl.trans(xs)
        rows = _rows(xs, factors, stride, t, valid, i, count, sub, prefixes, K, P, PREFIXES)
        a0 = tl.dot(rounded(rows, PRECISION), ys, a0, input_precision=PRECISION)
        if TILES > 1:
            rows = _rows(xs, factors, stride, t, valid, i + PREFIXES, count, sub, prefixes, K, P, PREFIXES)
            a1 = tl.dot(rounded(rows, PRECISION), ys, a1, input_precision=PRECISION)
        if TILES > 2:
            rows = _rows(xs, factors, stride, t, valid, i + 2 * PREFIXES, count, sub, prefixes, K, P, PREFIXES)
            a2 = tl.dot(rounded(rows, PRECISION), ys, a2, input_precision=PRECISION)
            rows = _rows(xs, factors, stride, t, valid, i + 3 * PREFIXES, count, sub, prefixes, K, P, PREFIXES)
            a3 = tl.dot(rounded(rows, PRECISION), ys, a3, input_precision=PRECISION)
    if AFTER:
        _write(out, rounded(a0, PRECISION), i, count, sub, j, col, columns, WIDTH)
        if TILES > 1:
            _write(out, rounded(a1, PRECISION), i + PREFIXES, count, sub, j, col, columns, WIDTH)
        if TILES > 2:
            _write(out, rounded(a2, PRECISION), i + 2 * PREFIXES, count, sub, j, col, columns, WIDTH)
            _write(out, rounded(a3, PRECISION), i + 3 * PREFIXES, count, sub, j, col, columns, WIDTH)
    if FINAL:
        _write(final, a0, i, count, sub, j, col, columns, WIDTH)
        if TILES > 1:
            _write(final, a1, i + PREFIXES, count, sub, j, col, columns, WIDTH)
        if TILES > 2:
            _write(final, a2, i + 2 * PREFIXES, count, sub, j, col, columns, WIDTH)
            _write(final, a3, i + 3 * PREFIXES, count, sub, j, col, columns, WIDTH)


@triton.jit
def state_pass(
    x, x_st, x_sh, xt, stride, y, y_st, y_sh, sums, s_out, z_out, s_init, z_init, s_final, z_final,
    s_forward, z_forward, products, prefixes, starts, chunk_starts, T, tokens, row_states, G, lower, upper,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    TILES: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, Z: tl.constexpr, REVERSE: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr,
    AFTER: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Computes s_out [chunks, G, rows, V] and z_out [chunks, G, K, K]: the state before each chunk (after it, in
    reverse), without the part of that chunk. Grid: tiles of rows (those of Z first), key/value heads, sequences.

    In reverse, `products` [chunks, G, programs] or None gets the inner products, in parts, with the states of the
    forward at the ends of all chunks but the last. s_forward and z_forward are those states. They are at the same
    boundaries as s_out and z_out, and may be the same memory. Only for p = 1 and 2.

    row_states: as in `output.output_pass`. AFTER: rows have one chunk, and s_out gets the state after it (before it, in
    reverse), with this part.
    """
    g = tl.cast(tl.program_id(1), tl.int64)
    n = tl.program_id(2)
    if PACKED:
        start = tl.load(starts + n).to(tl.int64)
        length = (tl.load(starts + n + 1) - start).to(tl.int32)
    else:
        start = tl.cast(n, tl.int64) * T
        length = T
    chunk0 = first_state(n, chunk_starts, row_states, PACKED)
    chunks = tl.cdiv(length, CHUNK)
    UPPER: tl.constexpr = K - HALF
    lower_tile: tl.constexpr = TILES * (64 // K if K < 64 else 1)
    upper_tile: tl.constexpr = TILES * (64 // UPPER if UPPER > 0 and UPPER < 64 else 1)
    rows = tl.cast(lower, tl.int64) * K + upper * UPPER
    x += start * x_st + g * R * x_sh
    y += start * y_st + g * R * y_sh
    xt_sh = stride * (2 * K + 1 if P > 2 else K + 1)
    xt += g * R * xt_sh + aligned(start, n, ALIGN)
    sums += g * tokens + start
    s_out += (chunk0 * G + g) * rows * V
    s_init += (tl.cast(n, tl.int64) * G + g) * rows * V
    s_final += (tl.cast(n, tl.int64) * G + g) * rows * V
    if products is not None:
        s_forward += (chunk0 * G + g) * rows * V
        products += (chunk0 * G + g) * tl.num_programs(0) + tl.program_id(0)
    products_step = G * tl.num_programs(0)
    tile = tl.program_id(0)
    if Z:
        tile -= 1
    lower_tiles = tl.cdiv(lower, lower_tile)
    if tile < 0:
        z = (chunk0 * G + g) * (K * K)
        z_end = (tl.cast(n, tl.int64) * G + g) * (K * K)
        other = z_forward
        if products is not None:
            other += z
        _walk(
            x, x_st, x_sh, xt + K * stride, xt_sh, stride, x, x_st, x_sh, sums, z_out + z, G * K * K, z_init + z_end,
            z_final + z_end, other, products, products_step, prefixes, 0, 1, start, length, chunks, K,
            0, K, K, K, K, P, R, 1, STEP, CHUNK, PRECISION, GATED, REVERSE, INIT, FINAL, AFTER,
        )  # fmt: skip
    elif tile < lower_tiles:
        _walk(
            x, x_st, x_sh, xt, xt_sh, stride, y, y_st, y_sh, sums, s_out, G * rows * V, s_init, s_final, s_forward,
            products, products_step, prefixes, tile * lower_tile, lower, start, length, chunks, V,
            0, K, HALF, COLUMNS, K, P, R, TILES, STEP, CHUNK, PRECISION, GATED, REVERSE, INIT, FINAL, AFTER,
        )  # fmt: skip
    elif UPPER > 0:
        past = tl.cast(lower, tl.int64) * K * V
        if products is not None:
            s_forward += past
        _walk(
            x, x_st, x_sh, xt + lower * stride if P == 2 else xt, xt_sh, stride, y, y_st, y_sh, sums, s_out + past,
            G * rows * V, s_init + past, s_final + past, s_forward, products, products_step,
            prefixes + lower * (P - 1), (tile - lower_tiles) * upper_tile, upper, start, length, chunks, V,
            HALF, UPPER, K, COLUMNS, K, P, R, TILES, STEP, CHUNK, PRECISION, GATED, REVERSE, INIT, FINAL, AFTER,
        )  # fmt: skip
