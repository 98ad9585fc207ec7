"""The state of decoding: a state of power attention, a tail of tokens not yet folded into it, and slots for batches.

`decoding.py` explains the tail and computes the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sympow.ops.availability import without_autocast
from sympow.ops.feature_map import spow, spow_dim
from sympow.ops.types import PowerState, check_dense


def default_capacity(dim: int) -> int:
    """Returns the number of tokens that a tail beside D rows of state has room for.

    With a longer tail the state is written less often. But the tail is also read for every token and takes memory. With
    this number of tokens and K = V, the tail has about 1/16 of the elements of the state.
    """
    return max(4, min(64, dim // 32))


def tail_elements(key_dim: int, value_dim: int, p: int) -> int:
    """Returns the number of elements a kv head that a DecodingState of default capacity holds beyond its PowerState."""
    return default_capacity(spow_dim(key_dim, p)) * (key_dim + value_dim + 1) + 2


@dataclass(frozen=True)
class DecodingState:
    """Holds a PowerState and a tail of tokens not yet folded into it.

    Its size does not grow.

    `power_attention_step` continues it. `from_state` makes it from a PowerState. To save it, convert it to a
    PowerState: `state.folded().save(path)`.

    The tensors can be a pool of N slots, of which a batch takes any: `pool.at(slots)` is the state of the batch, and
    steps change those slots and no others. Without `slots` the batch is all N. The tensors of a slot are contiguous;
    strides between slots are free, so that the tensors of all layers can be views of one page a slot.

    Attributes:
        s: [N, G, D, V] and z: [N, G, D], as in PowerState, after the last folded token. s may be bfloat16 or int8, with
            z in float32. A step then reads half or a quarter of the bytes, and s is rounded whenever a tail is folded.
        tail_k: [N, G, C, K] and tail_v: [N, G, C, V], the tokens after that one, in any dtype of the inputs.
        tail_g: [N, G, C], their log gates, in the dtype of z; 0 for tokens without a gate.
        count: int32 [N, G], the number of tokens in the tail, 0 to C. If there is no room for the tokens of a step, the
            step first folds the tail. A step of more than C tokens also folds between its tokens.
        arrived: int32 [N, G], 0 between steps: a counter of the kernel's.
        p: the power; D = spow_dim(K, p).
        key_dim: K.
        slots: int32 [B], the slot of each sequence of the batch, each from 0 to N - 1 and none twice; None: all of
            them. The numbers are not checked, because the host would have to wait for the GPU.
        scales: float32 [N, G, D], the scales of an int8 s: row d of the state is s[..., d, :] * scales[..., d]. None
            for another dtype of s.
        folds: int32 [N, G], how often an int8 s was rounded since it was made. It decides how numbers are rounded next.
            None for another dtype of s.
    """

    s: Tensor
    z: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_g: Tensor
    count: Tensor
    arrived: Tensor
    p: int
    key_dim: int
    slots: Tensor | None = None
    scales: Tensor | None = None
    folds: Tensor | None = None

    def __post_init__(self) -> None:
        narrow = self.s.dtype in NARROW and self.z.dtype == torch.float32
        # A PowerState checks the others.
        PowerState(self.z[..., None].expand_as(self.s) if narrow else self.s, self.z, self.p, self.key_dim)
        _check_slots(self.slots, self.s)
        check_dense("tail_k of a DecodingState", self.tail_k)
        heads, room = tuple(self.s.shape[:2]), tuple(self.tail_k.shape[:3])
        wanted = {
            "tail_k": ((*room, self.key_dim), self.tail_k.dtype),
            "tail_v": ((*room, self.value_dim), self.tail_k.dtype),
            "tail_g": (room, self.z.dtype),
            "count": (heads, torch.int32),
            "arrived": (heads, torch.int32),
        }
        of_int8 = {"scales": (tuple(self.z.shape), torch.float32), "folds": (heads, torch.int32)}
        for name in of_int8:
            if (getattr(self, name) is None) == (self.s.dtype == torch.int8):
                got = type(getattr(self, name)).__name__
                raise TypeError(f"a DecodingState has {name} if s is int8; got {got} for {self.s.dtype}")
        wanted |= of_int8 if self.s.dtype == torch.int8 else {}
        for name, (shape, dtype) in wanted.items():
            x = check_dense(f"{name} of a DecodingState", getattr(self, name))
            if x.dtype != dtype or x.device != self.z.device:
                raise TypeError(
                    f"{name} of this DecodingState must be {dtype} on {self.z.device}; got {x.dtype} on {x.device}"
                )
            if room[:2] != heads or tuple(x.shape) != shape:
                raise ValueError(
                    f"a DecodingState with s {list(self.s.shape)} and tail_k {list(self.tail_k.shape)} holds {name} "
                    f"{list(shape)}; got {list(x.shape)}"
                )
        if not all(x[:1].is_contiguous() for x in self.tensors().values()):
            raise ValueError("the tensors of every slot of a DecodingState must be contiguous")

    @classmethod
    def from_state(
        cls,
        state: PowerState,
        *,
        dtype: torch.dtype | None = None,
        capacity: int | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> DecodingState:
        """Returns `state` with an empty tail.

        It shares those tensors of `state` that keep their dtype. Steps in place overwrite them.

        Args:
            state: the state of the tokens so far.
            dtype: the dtype of keys and values in the tail: that of later inputs, or a wider one; None: that of
                `state`.
            capacity: C, tokens the tail has room for, at least 1; `default_capacity(D)` if None.
            state_dtype: the dtype of s. None keeps that of `state`. A float32 state can be kept in bfloat16 or int8.

        Raises TypeError for another kind of state and for dtypes that cannot be used, and ValueError for another
        capacity.
        """
        if not isinstance(state, PowerState):
            raise TypeError(f"state must be a PowerState; got {type(state).__name__}")
        capacity = default_capacity(state.s.shape[2]) if capacity is None else capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be an integer >= 1; got {capacity!r}")
        dtype = state.s.dtype if dtype is None else dtype
        if torch.promote_types(dtype, torch.float32) != state.s.dtype:
            raise TypeError(f"a {state.s.dtype} state continues with inputs of a dtype it can hold; got {dtype}")
        shape, device = (*state.s.shape[:2], capacity), state.s.device
        made = cls(
            s=state.s.contiguous(),
            z=state.z.contiguous(),
            tail_k=torch.zeros(*shape, state.key_dim, device=device, dtype=dtype),
            tail_v=torch.zeros(*shape, state.value_dim, device=device, dtype=dtype),
            tail_g=torch.zeros(shape, device=device, dtype=state.s.dtype),
            count=torch.zeros(shape[:2], device=device, dtype=torch.int32),
            arrived=torch.zeros(shape[:2], device=device, dtype=torch.int32),
            p=state.p,
            key_dim=state.key_dim,
        )
        return made if state_dtype is None else made.kept_in(state_dtype)

    @property
    def batch(self) -> int:
        """Returns the number of sequences of the batch, B."""
        return self.s.shape[0] if self.slots is None else self.slots.shape[0]

    @property
    def capacity(self) -> int:
        """Returns C, the tokens that the tail has room for."""
        return self.tail_k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the keys and values in the tail."""
        return self.tail_k.dtype

    @property
    def value_dim(self) -> int:
        """Returns V, the width of the values."""
        return self.s.shape[3]

    @property
    def nbytes(self) -> int:
        """Returns the bytes held, the tail's spare room and all slots included."""
        return sum(x.nbytes for x in self.tensors().values())

    def at(self, slots: Tensor | None) -> DecodingState:
        """Returns the state of a batch in these slots of the pool, int32 [B]; None: of all.

        It shares all tensors.

        Raises TypeError or ValueError for another dtype, shape or device.
        """
        return replace(self, slots=slots)

    def taken(self) -> DecodingState:
        """Returns a copy of the batch without slots, for functions that do not support slots."""
        if self.slots is None:
            return self
        return self._replaced({name: x.index_select(0, self.slots) for name, x in self.tensors().items()}, None)

    def put(self, state: PowerState | DecodingState, *, later: bool = False) -> None:
        """Writes a state of as many sequences into the slots of the batch: a PowerState with an empty tail.

        s gets the dtype that these slots have. With `later` the state is a later one of the sequences in these slots,
        so an int8 s is rounded as if its tail had been folded. Raises ValueError where shapes, the power or the tail's
        room differ.
        """
        if isinstance(state, PowerState):
            state = DecodingState.from_state(state, dtype=self.dtype, capacity=self.capacity)
        folds = self.taken().folds if later else None
        given = state.taken()._kept_in(self.s.dtype, None if folds is None else folds + 1).tensors()
        for name, x in self.tensors().items():
            wanted = (self.batch, *x.shape[1:])
            if tuple(given[name].shape) != wanted or (state.p, state.key_dim) != (self.p, self.key_dim):
                got = f"{list(given[name].shape)} of p={state.p}"
                raise ValueError(f"these slots hold {name} {list(wanted)} of p={self.p}; got {got}")
        for name, x in self.tensors().items():
            if self.slots is None:
                x.copy_(given[name])
            else:
                x.index_copy_(0, self.slots.long(), given[name].to(x.dtype))

    def continued(self, state: PowerState) -> DecodingState:
        """Returns `state` with an empty tail, kept as this one is: in its slots, if it has slots, and in its dtypes."""
        if self.slots is not None:
            self.put(state, later=True)
            return self
        after = DecodingState.from_state(state, dtype=self.dtype, capacity=self.capacity)
        narrow = self.s.dtype in NARROW
        return after._kept_in(self.s.dtype, None if self.folds is None else self.folds + 1) if narrow else after

    def kept_in(self, state_dtype: torch.dtype) -> DecodingState:
        """Returns the state with s in another dtype, float32, bfloat16 or int8. It shares the other tensors.

        Raises TypeError for a float64 state.
        """
        return self._kept_in(state_dtype, None)

    def _kept_in(self, state_dtype: torch.dtype, folds: Tensor | None) -> DecodingState:
        if state_dtype == self.s.dtype:
            return self
        wide = self.z.dtype
        if state_dtype != wide and (wide != torch.float32 or state_dtype not in NARROW):
            raise TypeError(
                f"a {wide} state is kept as it is, or in bfloat16 or int8 if it is float32; got {state_dtype}"
            )
        if state_dtype != torch.int8:
            return replace(self, s=self.sums().to(state_dtype).contiguous(), scales=None, folds=None)
        folds = torch.zeros_like(self.count, memory_format=torch.contiguous_format) if folds is None else folds
        s, scales = in_int8(self.sums(), folds)
        return replace(self, s=s, scales=scales, folds=folds)

    def sums(self) -> Tensor:
        """Returns s in the dtype of z, with its scales if it has any."""
        s = self.s.to(self.z.dtype)
        return s if self.scales is None else s * self.scales[..., None]

    def to(self, device: torch.device | str) -> DecodingState:
        """Moves the state to a device."""
        slots = None if self.slots is None else self.slots.to(device)
        return self._replaced({name: x.to(device) for name, x in self.tensors().items()}, slots)

    def detach(self) -> DecodingState:
        """Returns the state cut off from the graph of gradients; it shares its tensors."""
        return self._replaced({name: x.detach() for name, x in self.tensors().items()}, self.slots)

    def clone(self) -> DecodingState:
        """Copies the batch; the copy is no pool."""
        if self.slots is not None:
            return self.taken()
        copies = {name: x.clone(memory_format=torch.contiguous_format) for name, x in self.tensors().items()}
        return self._replaced(copies, None)

    def rollback(self, tokens: int) -> None:
        """Takes back the last `tokens` tokens, in place, as if they had never been read.

        The tokens of the last step are always in the tail, if they were at most C.

        Raises ValueError if the tail has fewer tokens. On a GPU nothing is checked, and the tail is then empty.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"the tokens to take back must be an integer >= 0; got {tokens!r}")
        if self.slots is not None:
            part = self.taken()
            part.rollback(tokens)
            self.put(part)
            return
        held = tokens if self.count.is_cuda or not self.count.numel() else int(self.count.min())
        if tokens > held:
            raise ValueError(f"only tokens of the tail can be taken back, and it holds {held}; got {tokens}")
        self.count.sub_(tokens).clamp_(min=0)
        # A weight of 0 does not remove values that are not finite.
        gone = torch.arange(self.capacity, device=self.count.device) >= self.count[..., None]
        self.tail_g.masked_fill_(gone, 0)
        self.tail_k.masked_fill_(gone[..., None], 0)
        self.tail_v.masked_fill_(gone[..., None], 0)

    def folded(self, dtype: torch.dtype | None = None) -> PowerState:
        """Returns the PowerState after the last token: new tensors, this state stays as it is.

        Gradients flow to s and z.

        It is computed and returned in `dtype`, float32 or float64; None: the dtype of z.
        """
        if self.slots is not None:
            return self.taken().folded(dtype)
        dtype = self.z.dtype if dtype is None else dtype
        held = torch.arange(self.capacity, device=self.s.device) < self.count[..., None]
        tail_g = self.tail_g.masked_fill(~held, 0)
        state = PowerState(self.sums(), self.z, self.p, self.key_dim)
        return folded_state(state, self.tail_k, self.tail_v, tail_g, held, dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of all slots, by name."""
        held = {name: getattr(self, name) for name in _HELD}
        return held | {name: x for name, x in (("scales", self.scales), ("folds", self.folds)) if x is not None}

    def _replaced(self, tensors: dict[str, Tensor], slots: Tensor | None) -> DecodingState:
        return DecodingState(**tensors, p=self.p, key_dim=self.key_dim, slots=slots)


_HELD = ("s", "z", "tail_k", "tail_v", "tail_g", "count", "arrived")
NARROW = (torch.bfloat16, torch.int8)  # dtypes of s beside a z in float32
LEAST_SCALE = 2.0**-126  # of a row in int8, so that its inverse is finite


def in_int8(s: Tensor, folds: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a float32 s [..., D, V] in int8, and its scales [..., D].

    The largest number of a row becomes 127 or -127. A number is rounded up if its fraction is larger than a
    threshold. Rounding to the nearest number would lose all tokens whose terms are smaller than half a step. So each
    place has a threshold of its own, which a hash of the row and the column gives, and which moves on by the golden
    ratio with each of the `folds` [...], int32. Over many folds a number is then rounded up as often as its fraction
    says, and the numbers themselves do not decide: a state that differs a little is rounded in the same way. A row with
    a number that is not finite becomes NaN.
    """
    scales = s.abs().amax(-1) / 127 + (s * 0).sum(-1)  # the second term is NaN if a number is not finite
    scales = torch.where(scales < LEAST_SCALE, LEAST_SCALE, scales)
    row, column = (torch.arange(size, dtype=torch.int32, device=s.device) for size in s.shape[-2:])
    bits = (row[:, None] * HASH[0] + column) * HASH[1]
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * HASH[0] + (folds * HASH[0])[..., None, None]
    upwards = ((bits >> 8) & 0xFFFFFF) * 2.0**-24
    return (s * (1 / scales)[..., None] + upwards).floor().clamp(-127, 127).to(torch.int8), scales


HASH = (-1640531535, -2048144777)  # odd factors as int32: 0x9E3779B1, the golden ratio times 2**32, and 0x85EBCA77


def _check_slots(slots: Tensor | None, s: Tensor) -> None:
    if slots is None:
        return
    if not isinstance(slots, Tensor) or slots.dtype != torch.int32:
        got = slots.dtype if isinstance(slots, Tensor) else type(slots).__name__
        raise TypeError(f"slots must be a tensor of int32; got {got}")
    if slots.ndim != 1 or not slots.is_contiguous() or slots.device != s.device:
        raise ValueError(
            f"slots must be [B], contiguous and on the state's device, {s.device}; "
            f"got {list(slots.shape)} with strides {list(slots.stride())} on {slots.device}"
        )


def folded_state(
    state: PowerState, k: Tensor, v: Tensor, log_g: Tensor, held: Tensor | None, dtype: torch.dtype
) -> PowerState:
    """Returns the state, in `dtype`, after C tokens k [B, G, C, K], v [B, G, C, V] and log_g [B, G, C] (M12).

    If `held` [B, G, C] is given, it is the state after the tokens that `held` marks.
    """
    left, kept = decays(log_g.to(dtype))
    kept = kept if held is None else kept * held
    with without_autocast(state.s):
        phi = spow(k.to(dtype), state.p) * kept[..., None]  # [B, G, C, D]
        s = state.s * left[..., None, None] + phi.transpose(2, 3) @ v.to(dtype)
    return PowerState(s, state.z * left[..., None] + phi.sum(2), state.p, state.key_dim)


def decays(log_g: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the decays of C tokens with log gates [..., C]: of the past, [...], and of each token, [..., C]."""
    after = torch.cat([log_g[..., 1:], torch.zeros_like(log_g[..., :1])], -1)
    return log_g.sum(-1).exp(), after.flip(-1).cumsum(-1).flip(-1).exp()
