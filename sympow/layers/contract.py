"""Checks that a mixer keeps the contract of `Mixer`, with random inputs in float64."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor

from sympow.layers.base import Mixer


class ContractError(ValueError):
    """Says in one line which part of the contract a mixer does not keep."""


@torch.no_grad()
def check_contract(mixer: Mixer, *, tokens: int = 37, tolerance: float = 1e-9, seed: int = 0) -> None:
    """Checks a mixer: shapes, causality, packed documents, steps of different lengths, and the size of the state.

    Args:
        mixer: the mixer, on the CPU. A copy of it in float64 is checked, in evaluation mode.
        tokens: T, the number of tokens of the inputs, at least 8.
        tolerance: the largest difference, relative to outputs of about 1.
        seed: the seed of the inputs [2, T, d].

    Raises ContractError for the first part of the contract that the mixer does not keep, and ValueError for less than 8
    tokens. Other errors are those of the mixer.
    """
    if tokens < 8:
        raise ValueError(f"tokens must be at least 8; got {tokens}")
    mixer = copy.deepcopy(mixer).double().eval()
    generator = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(2, tokens, mixer.d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    name = type(mixer).__name__
    y = _run(mixer, x)
    if y.shape != x.shape or y.dtype != x.dtype or not y.isfinite().all():
        found = f"{list(y.shape)} of {y.dtype}{'' if y.isfinite().all() else ', not all finite'}"
        raise ContractError(f"{name}: expected finite outputs {list(x.shape)} of {x.dtype}, got {found}")

    def compare(what: str, got: Tensor, wanted: Tensor) -> None:
        error = (got - wanted).abs().max().item() if got.shape == wanted.shape else None
        if error is None:
            raise ContractError(f"{name}: {what}: expected {list(wanted.shape)}, got {list(got.shape)}")
        if not error <= tolerance * max(1.0, wanted.abs().max().item()):
            raise ContractError(f"{name}: {what} differs by {error:.1e}")

    bounds = [0, 5, 5, 6, tokens]
    packed = _run(mixer, x[:1], cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = [_run(mixer, x[:1, a:b]) for a, b in pairwise(bounds) if a < b]
    compare("the output for packed documents", packed, torch.cat(alone, dim=1))
    if not mixer.causal:
        return
    for start in (1, tokens // 2, tokens - 1):
        changed = torch.cat([x[:, :start], other[:, start:]], dim=1)
        compare("an output before a token that changed", _run(mixer, changed)[:, :start], y[:, :start])
    for lengths in ([tokens], [1] * tokens, [tokens // 2] + [1] * (tokens - tokens // 2), [1, tokens - 1]):
        state, outs = mixer.init_state(2), []
        for piece in x.split(lengths, dim=1):
            out, state = mixer.step(piece, state, **_extras(mixer, piece))
            outs.append(out)
        compare(f"the output of {len(lengths)} steps", torch.cat(outs, dim=1), y)
        held = sum(tensor.numel() for tensor in state.tensors())
        if held != 2 * mixer.state_size(tokens):
            said = f"{mixer.state_size(tokens):,} elements for each sequence after {tokens} tokens"
            raise ContractError(f"{name}: state_size says {said}, the state has {held // 2:,}")
    state = mixer.init_state(2)
    for kept in (0, 3, 5):
        _, after = mixer.try_step(other[:, :5], state.clone(), **_extras(mixer, other[:, :5]))
        rest, _ = mixer.step(x[:, :1], after(kept), **_extras(mixer, x[:, :1]))
        whole = _run(mixer, torch.cat([other[:, :kept], x[:, :1]], dim=1))
        compare(f"a step after {kept} of 5 tokens of try_step", rest, whole[:, -1:])


def _run(mixer: Mixer, x: Tensor, **documents: Tensor) -> Tensor:
    return mixer(x, **documents, **_extras(mixer, x))


def _extras(mixer: Mixer, x: Tensor) -> dict[str, Tensor | None]:
    """Returns tokens for mixers that read them: a few kinds that repeat, each a function of its row of x."""
    return mixer.extras((1.5 * x[..., 0]).round().long())
