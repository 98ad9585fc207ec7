"""Softmax attention for selected tokens only: at random, where a token repeats, or where a learned score says so.

A few such layers among BaseConv ones are the hybrids of Zoology; selecting every token is `SoftmaxAttention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import AttentionMixer, HeadOptions
from sympow.layers.auxiliary import add_auxiliary_loss, collecting
from sympow.layers.base import any_weight, state_options
from sympow.layers.cache import InputCache, KVCache, capacity
from sympow.layers.documents import per_document
from sympow.layers.float32_linear import linear_float32
from sympow.layers.repeats import checked_tokens, distance_to_previous
from sympow.layers.softmax import MASK_ELEMENTS, attend, both_ways, empty_cache
from sympow.layers.state import Device, DType, MixerState
from sympow.ops.availability import check_float64, concatenated, has_symbols, has_values
from sympow.ops.runtime.launcher import ALL_DEVICES, operator
from sympow.ops.types import check_flags

SELECTIONS = ("random", "programmatic", "learned")

_BLOCK = 64  # scores compared with each other at once
_UNLIMITED = 1 << 62


@dataclass
class TopKState(MixerState):
    """Holds the k largest scores so far [B, k], the number of selected tokens [B], and the number of tokens so far."""

    largest: Tensor
    selected: Tensor
    position: int


@dataclass
class DrawState(MixerState):
    """Holds the number of tokens so far, which is all that random selection needs."""

    position: int


Choice = TopKState | DrawState | InputCache


@dataclass
class SelectionState(MixerState):
    """Holds keys and values of all tokens, and the state of the selection: scores, a position, or the tokens."""

    cache: KVCache
    choice: Choice


class SelectiveAttention(AttentionMixer):
    """Computes causal softmax attention in which only selected tokens have queries; the output of the others is 0.

    Source: Arora et al., "Zoology", 2023, section 5 and appendix. Every token can be attended to. Rotary.

    In learned selection, the source selects the k largest scores of the whole sequence, which depends on later tokens.
    Here a token is selected if its score is among the k largest so far. At most k (1 + ln(1 + t / k)) of the first
    t + 1 tokens are selected, the average number for scores in random order. So the layer is causal, and costs
    O(T k log T) products, also in training. `whole_row` selects as the source does. Then the layer is not causal and
    cannot be stepped.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        selection: "random": every token with the same probability, independently of all others and of its position.
            The tokens are drawn again in every step of training, from torch's default generator. Otherwise they are
            fixed: a hash of the position and of `layer_index` draws them, the same for all rows.
            "programmatic": every token that occurred before (needs `tokens`; their number has no limit).
            "learned": by a score sigmoid(w . x + b), which also multiplies the output, and so learns; in training with
            noise added, and with an auxiliary loss max(0, mean score - k / T) (see `auxiliary_losses`).
        top_k: k, of learned selection.
        whole_row: whether learned selection takes the k largest scores of the whole sequence, as in the source.
        probability: that random selection takes a token, above 0 and at most 1.
        noise: standard deviation of the noise that is added to learned scores in training, before they are compared.
            Like dropout, the noise comes from torch's default generator.
        rotation: "fixed" or "none".
        **heads: options of `AttentionMixer`.
    """

    own_output: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        selection: str,
        top_k: int = 16,
        whole_row: bool = False,
        probability: float = 0.25,
        noise: float = 0.1,
        rotation: str = "fixed",
        **heads: Unpack[HeadOptions],
    ):
        super().__init__(d_model, n_heads, rotation=rotation, **heads)
        if selection not in SELECTIONS:
            raise ValueError(f"selection is one of {', '.join(SELECTIONS)}; got {selection!r}")
        if not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k must be an integer of at least 1; got {top_k!r}")
        check_flags(whole_row=whole_row)
        if whole_row and selection != "learned":
            raise ValueError(f"whole_row is an option of learned selection; got selection {selection!r}")
        if not 0 < probability <= 1:
            raise ValueError(f"probability must be above 0 and at most 1; got {probability!r}")
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise must be finite and at least 0; got {noise!r}")
        self.selection, self.top_k, self.probability, self.noise = selection, top_k, probability, noise
        self.reads_tokens = selection == "programmatic"
        self.whole_row, self.causal = whole_row, not whole_row
        self.score = nn.Linear(d_model, 1) if selection == "learned" else None
        self.reset_parameters()

    def gated_output(self, y: Tensor, gates: Tensor | None) -> Tensor:
        """Returns y, because `mix` has projected the outputs of the selected tokens alone."""
        return y

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None, *, tokens: Tensor | None = None) -> Tensor:
        q, k, v = self.rotated_heads(x)
        inputs = [x, q, k, v, *self._ids(x, tokens)]
        return per_document(self._whole, cu_seqlens, *inputs)

    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> SelectionState:
        """Returns the state of `mix_step` before the first token; see `AttentionMixer.mix_state`.

        Raises NotImplementedError with `whole_row`.
        """
        self._check_causal()
        return SelectionState(empty_cache(self, batch_size, device, dtype), self._choice(batch_size, device, dtype))

    @override
    def mix_step(
        self, x: Tensor, state: SelectionState, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, SelectionState]:
        q, k, v = self.rotated_heads(x, state.cache.length)
        selected, gate, choice = self._select(x, state.choice, *self._ids(x, tokens))
        cache = state.cache.extend(k.transpose(1, 2), v.transpose(1, 2))
        y = self._attend(q, *cache.filled(), selected)
        return self._gated(y, gate), SelectionState(cache, choice)

    def mix_state_size(self, context: int) -> int:
        """Returns the number of elements of the state of `mix_step`; see `AttentionMixer.mix_state_size`.

        Raises NotImplementedError with `whole_row`.
        """
        self._check_causal()
        cache = self.n_kv_heads * (self.head_dim + self.value_dim) * capacity(context)
        return cache + {"random": 0, "programmatic": capacity(context), "learned": self.top_k + 1}[self.selection]

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        Those are the expected ones for scores in random order. Programmatic selection counts all tokens, because how
        many of them repeat depends on the data.
        """
        if self.selection == "learned" and not self.whole_row:
            return both_ways(time, self, self.top_k)  # token t + 1 is selected with the probability k / (t + 1)
        share = {"random": self.probability, "programmatic": 1.0, "learned": min(1.0, self.top_k / time)}
        return round(share[self.selection] * both_ways(time, self))

    def _check_causal(self) -> None:
        if not self.causal:
            raise NotImplementedError("selection with whole_row has no step form: it depends on the whole sequence")

    def _ids(self, x: Tensor, tokens: Tensor | None) -> list[Tensor]:
        return [checked_tokens(tokens, x)] if self.reads_tokens else []

    def _whole(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *tokens: Tensor) -> Tensor:
        if self.reads_tokens:
            selected, gate = distance_to_previous(tokens[0]) > 0, None
        else:
            selected, gate, _ = self._select(x, self._choice(x.shape[0], x.device, None))
        if gate is not None and self.training and collecting():
            excess = gate.mean((1, 2)) - min(1.0, self.top_k / x.shape[1])
            add_auxiliary_loss(F.relu(excess).mean())
        return self._gated(self._attend(q, k.transpose(1, 2), v.transpose(1, 2), selected), gate)

    def _choice(self, batch_size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Choice:
        if self.selection == "random":
            return DrawState(0)
        options = state_options(any_weight(self, self.out), device, dtype, sums=True)
        if self.reads_tokens:
            return InputCache.empty(batch_size, 1, _UNLIMITED, options | {"dtype": torch.int64})
        largest = torch.full((batch_size, self.top_k), -torch.inf, **options)
        return TopKState(largest, largest.new_zeros(batch_size, dtype=torch.int64), 0)

    def _select(self, x: Tensor, choice: Choice, *tokens: Tensor) -> tuple[Tensor, Tensor | None, Choice]:
        """Returns the selected rows of x [B, T, d] as bool [B, T]; scores [B, T, 1] if learned; and the next state."""
        if isinstance(choice, InputCache):
            choice = choice.extend(tokens[0][..., None])
            return distance_to_previous(choice.ordered()[..., 0])[:, -x.shape[1] :] > 0, None, choice
        if isinstance(choice, DrawState):
            if self.training:
                drawn = torch.rand(x.shape[:2], device=x.device)
            else:
                drawn = scattered(choice.position, x.shape[1], x.device, self.layer_index).expand(x.shape[:2])
            return drawn < self.probability, None, DrawState(choice.position + x.shape[1])
        gate = torch.sigmoid(linear_float32(cast(nn.Linear, self.score), x))
        score = gate.detach()[..., 0]
        if self.training:
            score = score + self.noise * torch.randn_like(score)
        if self.whole_row:
            largest = score.topk(min(self.top_k, score.shape[1]), dim=1).indices
            return torch.zeros_like(score, dtype=torch.bool).scatter_(1, largest, True), gate, choice
        score = score.to(choice.largest.dtype)
        if has_symbols(x.shape[1]):
            selected, largest, number = graph_running_top_k(score, choice.largest, choice.selected, choice.position)
            return selected, gate, TopKState(largest, number, choice.position + x.shape[1])
        selected, choice = running_top_k(score, choice)
        return selected, gate, choice

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Tensor:
        """Attends from the selected rows of q [B, T, H, K] and projects; the others get 0: [B, T, d].

        q are the last T of the S tokens of k [B, G, S, K] and v [B, G, S, V]; selected is bool [B, T].
        """
        (batch, new), total = selected.shape, k.shape[2]
        most = most_rows(selected)
        # The selected rows come first, in order. Other rows fill up shorter lists; their results are multiplied by 0.
        rows = (~selected).long().argsort(dim=1, stable=True)[:, :most]
        asking = q.gather(1, rows[..., None, None].expand(-1, -1, *q.shape[2:])).to(k.dtype)
        position = torch.arange(total, device=q.device)
        step = max(1, MASK_ELEMENTS // max(1, batch * total))
        outs = [asking.new_empty(batch, 0, self.n_heads, self.value_dim)]
        for some, at in zip(asking.split(step, dim=1), (rows + total - new).split(step, dim=1), strict=True):
            mask = position <= at[:, None, :, None]
            outs.append(attend(some.transpose(1, 2), k, v, mask=mask).transpose(1, 2))
        y = self.out(concatenated(outs, dim=1).to(q.dtype).flatten(2)) * selected.gather(1, rows)[..., None]
        return y.new_zeros(batch, new, self.d_model).scatter(1, rows[..., None].expand_as(y), y)

    def _gated(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return y if gate is None else y * gate.to(y.dtype)


def most_rows(selected: Tensor) -> int:
    """Returns the largest number of selected rows in a sequence.

    On the meta device, in torch.compile, and while a CUDA graph is captured, numbers cannot be read. The result is then
    the number of all rows.
    """
    unknown = not has_values(selected)
    if unknown or (selected.is_cuda and torch.cuda.is_current_stream_capturing()):
        return selected.shape[1]
    return int(selected.sum(1).max()) if len(selected) else 0


def running_top_k(score: Tensor, state: TopKState) -> tuple[Tensor, TopKState]:
    """Selects rows of score [B, T] that are among the k largest up to themselves, within the budget; no gradient.

    Returns:
        bool [B, T], and the state after the last row.
    """
    largest, candidates = state.largest, []
    k = largest.shape[1]
    for piece in score.split(_BLOCK, dim=1):
        size = piece.shape[1]
        before = torch.ones(size, size, dtype=torch.bool, device=score.device).tril(-1)
        above = ((piece[:, None] >= piece[..., None]) & before).sum(-1)
        above = above + (largest[:, None] >= piece[..., None]).sum(-1)
        candidates.append(above < k)
        largest = torch.cat([largest, piece], dim=1).topk(k, dim=1).values
    wanted = torch.cat(candidates, dim=1).long().cumsum(1)
    check_float64(score.device)
    position = torch.arange(state.position, state.position + score.shape[1], device=score.device, dtype=torch.float64)
    budget = torch.ceil(k * (1 + torch.log1p(position / k))).long()
    # taken_t = min(taken_{t-1} + candidate_t, budget_t), unrolled
    room = torch.cummin(budget - wanted, dim=1).values
    taken = wanted + torch.minimum(state.selected[:, None], room)
    earlier = torch.cat([state.selected[:, None], taken[:, :-1]], dim=1)
    return taken > earlier, TopKState(largest, taken[:, -1].clone(), state.position + score.shape[1])


def _like_top_k(score: Tensor, largest: Tensor, selected: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = score.new_empty(score.shape, dtype=torch.bool)
    return chosen, largest.new_empty(largest.shape), selected.new_empty(selected.shape)


@operator(_like_top_k, devices=ALL_DEVICES)
def graph_running_top_k(
    score: Tensor, largest: Tensor, selected: Tensor, position: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `running_top_k` behind a state of these fields, whose blocks a graph would have for one length only."""
    chosen, after = running_top_k(score, TopKState(largest, selected, position))
    return chosen, after.largest, after.selected


def scattered(start: int, count: int, device: torch.device, layer: int = 0) -> Tensor:
    """Returns a number in [0, 1) for each of the positions start .. start + count - 1: a hash of position and layer."""
    check_float64(device)
    x = torch.arange(start + 1, start + count + 1, device=device) * 0x9E3779B9 + layer * 0x85EBCA6B & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # of MurmurHash3
        x = ((x >> shift) ^ x) * factor & 0xFFFFFFFF
    return ((x >> 16) ^ x).double() / 2**32
