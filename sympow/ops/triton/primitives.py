"""Functions that the kernels share. Letters are those of docs/math.md; also R = H / G, and s~ = q . k without the
scale."""

import triton
import triton.language as tl


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Lets the next kernel of the stream start, if it was launched with `launch_pdl`; that kernel waits by
    `await_last`."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_last(OVERLAP: tl.constexpr):
    """Waits until all writes of the previous kernel are visible, if this kernel was launched to start early."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def locate(pid, starts, blocks, T, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Returns the location of a program that has one block of one sequence.

    That is the sequence n, its first token (over all sequences), its length, and the index of the block's first token
    in it. `starts` is cu_seqlens, and `blocks` a table of (n, block); both exist only if PACKED.
    """
    if PACKED:
        n = tl.load(blocks + 2 * pid)
        first = tl.load(blocks + 2 * pid + 1) * BLOCK
        start = tl.load(starts + n).to(tl.int64)
        length = (tl.load(starts + n + 1) - start).to(tl.int32)
    else:
        count = tl.cdiv(T, BLOCK)
        n = pid // count
        first = (pid % count) * BLOCK
        start = tl.cast(n, tl.int64) * T
        length = T
    return n, start, length, first


@triton.jit
def reach_tile(n, g, token, T, tokens, TILE: tl.constexpr):
    """Returns the index in the results of `gate.gate_sums` for the tile of TILE tokens with `token`, of sequence n and
    key/value head g."""
    return (g * (tokens // T) + n) * tl.cdiv(T, TILE) + token // TILE


@triton.jit
def first_state(n, chunk_starts, row_states, PACKED: tl.constexpr):
    """Returns the number of the first state of sequence n, int64. Rows that are not packed have `row_states` each."""
    if PACKED:
        return tl.load(chunk_starts + n).to(tl.int64)
    else:
        return tl.cast(n, tl.int64) * row_states


@triton.jit
def first_chunk(n, chunk_starts, T, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Returns the index, over all sequences, of the first chunk of sequence n."""
    return first_state(n, chunk_starts, tl.cdiv(T, CHUNK), PACKED)


@triton.jit
def aligned(start, n, ALIGN: tl.constexpr):
    """Returns the start of sequence n in a buffer in which each sequence is padded to a multiple of ALIGN."""
    return tl.multiple_of((start + (ALIGN - 1)) // ALIGN * ALIGN + tl.cast(n, tl.int64) * ALIGN, ALIGN)


@triton.jit
def power(x, P: tl.constexpr):
    """Returns x**P by multiplication; P may be 0."""
    if P == 0:
        return x * 0.0 + 1.0
    else:
        y = x
        for _ in tl.static_range(P - 1):
            y = y * x
        return y


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """Returns x as a factor of tl.dot with this input_precision: if that is tf32, rounded to the nearest tf32.

    Tensor cores do not round float32 factors. They cut the last 13 bits off, so that all errors have the same sign and
    do not average out in sums.
    """
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # the sum could turn a NaN into a zero
    else:
        return x


@triton.jit
def lower_base(x, width, HALF: tl.constexpr, P: tl.constexpr):
    """Returns x for the rows of lower prefixes: a lower prefix with an upper last index counts for P orderings."""
    orderings = tl.where(width >= HALF, P, 1)[None, :]
    if P > 2:  # not a power of two, so it is rounded with the whole row
        return x.to(tl.float32) * orderings
    else:
        return x * orderings.to(x.dtype)


@triton.jit
def times_prefix(base, row_ptrs, valid, i, prefixes, weights, P: tl.constexpr):
    """Returns base [M, W] times the weighted product of the entries of each token at prefix i; `row_ptrs` [M] point to
    tokens."""
    if P == 1:
        return base.to(row_ptrs.dtype.element_ty)
    elif P == 2:
        return base * tl.load(row_ptrs + i, mask=valid, other=0.0).to(base.dtype)[:, None]
    else:
        factor = tl.load(weights + i)
        for m in tl.static_range(P - 1):
            index = tl.load(prefixes + i * (P - 1) + m)
            factor = tl.load(row_ptrs + index, mask=valid, other=0.0).to(tl.float32) * factor
        return (base.to(tl.float32) * factor[:, None]).to(row_ptrs.dtype.element_ty)
