"""Causal depthwise convolution of a few taps: every channel by itself, documents apart.

On a GPU there is one kernel for the forward, one for the backward and one for a step. Elsewhere, and for more taps than
the kernels take, it is plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import dtype_in_products, has_kernels, without_autocast
from sympow.ops.convolution import causal_convolution
from sympow.ops.packed import check_borders, checked_on_cpu, document_starts
from sympow.ops.runtime.launcher import cast, ceil_div, jit, launch, next_power_of_2, operator
from sympow.ops.types import check_dense

if TYPE_CHECKING:
    import triton.language as tl

MOST_TAPS = 16  # of the kernels, and of compiled code, which write out the sum over the taps
TOKENS, CHANNELS, WARPS = 32, 128, 4  # tokens and channels of a tile
# The backward: bytes of a channel in a tile, and tokens of a program, which is one warp. The sums of all programs for
# the weights are then added up.
BACKWARD_BYTES, SPAN = 8, 256


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, *, past: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns y_t = bias + sum over s < k of weight[:, k - 1 - s] x_{t-s}, with zeros before the first token.

    Sums are formed in float32 at least. Under autocast x is first cast to the dtype of autocast, unless it is float64,
    which autocast leaves as it is.

    Args:
        x: [B, T, C].
        weight: [C, k]; the last tap belongs to the token itself.
        bias: [C].
        past: [B, k - 1, C], the tokens before x, oldest first; None: zeros.
        cu_seqlens: int [N + 1], borders of N documents packed into one row (B = 1), which do not see each other.

    Returns:
        [B, T, C], in the dtype of x, or of autocast.

    Raises TypeError if x or past is no dense tensor.
    """
    check_dense("x", x)
    x = x.to(dtype_in_products(x))
    if past is not None:
        check_dense("past", past)
        x = torch.cat([past.to(x.dtype), x], dim=1)
    first = None
    if cu_seqlens is not None:
        check_borders(cu_seqlens, x.shape[0])
        first = document_starts(checked_on_cpu(cu_seqlens, x.shape[1]).to(x.device), x.shape[1])
    few = weight.shape[1] <= MOST_TAPS
    if few and has_kernels(x.device, x.dtype):
        y = fused_short_convolution(x, weight, bias, first)
    elif not few and first is None and (x.is_cuda or torch.compiler.is_compiling()):
        with without_autocast(x):
            y = (causal_convolution(x.to(_at_least_float32(x, weight)), weight.flip(1).T) + bias).to(x.dtype)
    else:
        y = _in_torch(x, weight, bias, first)
    return y if past is None else y[:, past.shape[1] :]


@torch.no_grad()
def short_convolution_step(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns what `short_convolution` does for a few tokens after `past`, and replaces `past` by the last inputs.

    There is no gradient. On a GPU it is one kernel.

    Args:
        x: [B, T, C].
        past: [B, k - 1, C], the tokens before x, oldest first. Afterwards it holds the last k - 1 tokens of both.
        weight: [C, k]; the last tap belongs to the token itself.
        bias: [C].

    Returns:
        [B, T, C], in the dtype of x, or of autocast.

    Raises TypeError if x or past is no dense tensor.
    """
    check_dense("x", x)
    check_dense("past", past)
    x = x.to(dtype_in_products(x))
    if x.shape[1] == 0:
        return x
    if weight.shape[1] <= MOST_TAPS and has_kernels(x.device, x.dtype):
        return fused_short_convolution_step(x, past, weight, bias)
    seen = torch.cat([past.to(x.dtype), x], dim=1)
    # Sums of k rows: calling a convolution takes longer than computing it.
    y = ((seen.unfold(1, weight.shape[1], 1) * weight).sum(-1) + bias).to(x.dtype)
    past.copy_(seen[:, x.shape[1] :])
    return y


def _in_torch(x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None) -> Tensor:
    dtype = _at_least_float32(x, weight)
    wide, width = x.to(dtype), weight.shape[1]
    with without_autocast(x):
        if first is None and x.shape[1] and not torch.compiler.is_compiling():
            padded = F.pad(wide.transpose(1, 2), (width - 1, 0))
            y = F.conv1d(padded, weight.to(dtype).unsqueeze(1), bias.to(dtype), groups=x.shape[2]).transpose(1, 2)
            return y.to(x.dtype)
        # Sums of shifted rows: a compiler fuses them with the operations around them.
        time = x.shape[1]
        padded = F.pad(wide, (0, 0, width - 1, 0))
        y = bias.to(dtype).expand_as(wide)
        token = torch.arange(time, device=x.device)
        for s in range(width):
            tap = padded[:, width - 1 - s : width - 1 - s + time] * weight[:, width - 1 - s].to(dtype)
            y = y + (tap if first is None else tap * (token - s >= first)[:, None])
    return y.to(x.dtype)


def _at_least_float32(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.promote_types(weight.dtype, torch.float32))


@jit(do_not_specialize=["T"])
def convolve(
    x,  # [B, T, C]
    weight,  # [C, WIDTH]
    bias,  # [C]
    first,  # int32 [T], the first token of each token's document, or None
    y,  # [B, T, C]
    T,
    C,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolves a tile of TOKENS tokens and CHANNELS channels."""
    blocks = tl.cdiv(T, TOKENS)
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    token = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside, real = token < T, channel < C
    start = tl.zeros([TOKENS], tl.int32)
    if first is not None:
        start = tl.load(first + token, mask=inside, other=0)
    x += i_b * T * C
    y += i_b * T * C
    total = tl.zeros([TOKENS, CHANNELS], tl.float32) + tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    for s in tl.static_range(WIDTH):
        seen = inside & (token - s >= start)
        tap = tl.load(weight + channel * WIDTH + WIDTH - 1 - s, mask=real, other=0.0).to(tl.float32)
        place = (token - s).to(tl.int64)[:, None] * C + channel[None, :]
        total += tl.load(x + place, mask=seen[:, None] & real[None, :], other=0.0).to(tl.float32) * tap[None, :]
    place = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@jit(do_not_specialize=["T"])
def convolve_step(
    x,  # [B, T, C]
    past,  # [B, WIDTH - 1, C], the inputs before x, strides past_sb and past_st; replaced by the last inputs
    weight,  # [C, WIDTH]
    bias,  # [C]
    y,  # [B, T, C]
    past_sb,
    past_st,
    T,
    C,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolves all tokens of CHANNELS channels of a row. HELD is the next power of two of WIDTH - 1."""
    i_b = tl.cast(tl.program_id(0), tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < C
    x += i_b * T * C
    y += i_b * T * C
    past += i_b * past_sb
    for t in range(T):
        total = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        for s in tl.static_range(WIDTH):
            token = t - s
            tap = tl.load(weight + channel * WIDTH + WIDTH - 1 - s, mask=real, other=0.0).to(tl.float32)
            new = tl.load(x + token * C + channel, mask=real & (token >= 0), other=0.0).to(tl.float32)
            place = (token + WIDTH - 1) * past_st + channel
            total += (new + tl.load(past + place, mask=real & (token < 0), other=0.0).to(tl.float32)) * tap
        tl.store(y + t * C + channel, total.to(y.dtype.element_ty), mask=real)
    i = tl.arange(0, HELD)
    token = i + T - (WIDTH - 1)
    new = tl.load(
        x + token[:, None] * C + channel[None, :],
        mask=((i < WIDTH - 1) & (token >= 0))[:, None] & real[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    old = tl.load(
        past + (i + T)[:, None] * past_st + channel[None, :],
        mask=((i < WIDTH - 1) & (token < 0))[:, None] & real[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    tl.debug_barrier()  # all threads have read what is overwritten now
    place = past + i[:, None] * past_st + channel[None, :]
    tl.store(place, (new + old).to(past.dtype.element_ty), mask=(i < WIDTH - 1)[:, None] & real[None, :])


@jit(do_not_specialize=["T"])
def convolve_backward(
    dy,  # [B, T, C]
    x,  # [B, T, C]
    weight,  # [C, WIDTH]
    first,  # int32 [T], the first token of each token's document, or None
    dx,  # [B, T, C]
    dweight,  # float32 [programs, C, WIDTH]: a part of the sum for each program
    dbias,  # float32 [programs, C], likewise
    T,
    C,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Computes the gradient of SPAN tokens of CHANNELS channels, and their part in the gradients of the weights."""
    blocks = tl.cdiv(T, SPAN)
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    begin = tl.program_id(0) % blocks * SPAN
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < C
    dy += i_b * T * C
    x += i_b * T * C
    dx += i_b * T * C
    # A program is one warp, in which a thread has all tokens of a tile for its channels. So sums over tokens need no
    # exchange between threads.
    taps, of_taps = (), ()
    for s in tl.static_range(WIDTH):
        taps += (tl.load(weight + channel * WIDTH + WIDTH - 1 - s, mask=real, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        of_taps += (tl.zeros([CHANNELS], tl.float32),)  # type: ignore[assignment]
    of_bias = tl.zeros([CHANNELS], tl.float32)
    for offset in range(0, SPAN, TOKENS):
        token = begin + offset + tl.arange(0, TOKENS)
        inside = token < T
        place = token.to(tl.int64)[:, None] * C + channel[None, :]
        mask = inside[:, None] & real[None, :]
        here = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        more = ()
        for s in tl.static_range(WIDTH):
            later = token + s
            seen = later < T
            if first is not None:
                start = tl.load(first + later, mask=seen, other=0)
                seen = seen & (token >= start)
            grad = tl.load(dy + place + s * C, mask=seen[:, None] & real[None, :], other=0.0).to(tl.float32)
            total += grad * taps[s][None, :]
            more += (of_taps[s] + tl.sum(grad * here, 0),)  # type: ignore[assignment]
            if s == 0:
                of_bias += tl.sum(grad, 0)
        of_taps = more
        tl.store(dx + place, total.to(dx.dtype.element_ty), mask=mask)
    part = tl.cast(tl.program_id(0), tl.int64) * C + channel
    for s in tl.static_range(WIDTH):
        tl.store(dweight + part * WIDTH + WIDTH - 1 - s, of_taps[s], mask=real)
    tl.store(dbias + part, of_bias, mask=real)


def _like_gradients(dy, x, weight, bias, first):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


@operator(_like_gradients)
def short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and bias."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    first = None if first is None else first.contiguous()
    (batch, time, channels), width = x.shape, weight.shape[1]
    programs = batch * ceil_div(time, SPAN)
    dx = torch.empty_like(x)
    dweight = torch.empty(programs, channels, width, device=x.device, dtype=torch.float32)
    dbias = torch.empty(programs, channels, device=x.device, dtype=torch.float32)
    if x.numel():
        with torch.cuda.device_of(x):
            numbers = {"T": time, "C": channels, "WIDTH": width, "SPAN": SPAN}
            tokens, tile = BACKWARD_BYTES // x.element_size(), _backward_channels(width)
            constants = {"TOKENS": tokens, "CHANNELS": tile, "num_warps": 1}
            launch(
                convolve_backward, (programs, ceil_div(channels, tile)), numbers | constants,
                dy=dy, x=x, weight=weight, first=first, dx=dx, dweight=dweight, dbias=dbias,
            )  # fmt: skip
    return dx, cast(dweight.sum(0), weight.dtype), cast(dbias.sum(0), bias.dtype)


def _backward_channels(width: int) -> int:
    """Returns the channels of a tile: a thread has a sum in a register for each of its channels and taps."""
    return 256 if width <= 4 else 64 if width <= 8 else 32


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return *short_convolution_backward(dy, *ctx.saved_tensors), None


def _like_output(x, weight, bias, first):
    return x.new_empty(x.shape)


@operator(_like_output, _keep, _backward)
def fused_short_convolution(x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None) -> Tensor:
    """Convolves x [B, T, C] with weight [C, k] and bias [C]; `first` is int32 [T] or None. Sums are in float32."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    first = None if first is None else first.contiguous()
    y = torch.empty_like(x)
    (batch, time, channels), width = x.shape, weight.shape[1]
    if x.numel():
        grid = (batch * ceil_div(time, TOKENS), ceil_div(channels, CHANNELS))
        with torch.cuda.device_of(x):
            numbers = {"T": time, "C": channels, "WIDTH": width}
            constants = {"TOKENS": TOKENS, "CHANNELS": CHANNELS, "num_warps": WARPS}
            launch(convolve, grid, numbers | constants, x=x, weight=weight, bias=bias, first=first, y=y)
    return y


def _like_step(x, past, weight, bias):
    return x.new_empty(x.shape)


@operator(_like_step, changes=("past",))
def fused_short_convolution_step(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolves x [B, T, C] after `past` [B, k - 1, C], which it replaces by the last k - 1 inputs."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    (batch, time, channels), width = x.shape, weight.shape[1]
    held = past if past.stride(2) == 1 else past.contiguous()
    if x.numel():
        with torch.cuda.device_of(x):
            numbers = {"past_sb": held.stride(0), "past_st": held.stride(1), "T": time, "C": channels, "WIDTH": width}
            constants = {"HELD": next_power_of_2(max(1, width - 1)), "CHANNELS": CHANNELS, "num_warps": WARPS}
            launch(
                convolve_step, (batch, ceil_div(channels, CHANNELS)), numbers | constants,
                x=x, past=held, weight=weight, bias=bias, y=y,
            )  # fmt: skip
    if held is not past:
        past.copy_(held)
    return y
