"""The delta rule by Triton kernels: prediction errors and their gradients, see `sympow.ops.delta_solve`.

The kernels are in `delta_kernels.py`. Within a chunk, groups of blocks of tokens are solved one after another, the
blocks of a group by the same program. What the tokens of a block take from one another is computed before, for all
blocks at once and without gates: with (D o A)_ij = d_i / d_j A_ij, (I + D o A)^-1 is D o (I + A)^-1. What a group takes
from others is computed by many programs. Between chunks the state is read and written by the kernels of power
attention. So are output and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sympow.ops import delta_solve
from sympow.ops.delta_types import DeltaGradients, DeltaOptions
from sympow.ops.feature_map import spow_dim
from sympow.ops.runtime.launcher import ceil_div, launcher_of, next_power_of_2, operator, padded_key_dim, processors
from sympow.ops.runtime.launcher import launch as launch_kernel
from sympow.ops.triton import adapt as power
from sympow.ops.triton import launch, plan
from sympow.ops.triton.delta_kernels import (
    block_corrections,
    group_corrections,
    groups_pass,
    key_gradient_pass,
    solve_pass,
)
from sympow.ops.triton.gate import REACH_TILE, gate_sums
from sympow.ops.triton.plan import Call, Gate, Launch, Shapes
from sympow.ops.types import PowerState

T = TypeVar("T")
BLOCK = 64  # tokens that are solved together
_CHUNK = 1024  # tokens of a chunk of rows that need more than one
_JOINED, _JOINED_DIM = 4, 64  # the most groups of a chunk that one launch solves, and the widest K
_ALONE = 4096  # the longest row that is one chunk, without states
_AHEAD = 8  # chunks whose corrections are computed together
_OF_GROUPS = ("k", "source", "read", "sums", "faded", "target")  # tensors that `groups_pass` takes
_ROWS = 64  # rows of a program that adds up the gradients of keys


# ------------------------------------------------------------------------------------------------- backend


class _States(NamedTuple):
    """Holds the states between chunks, in the rows of the kernels."""

    before: Tensor  # those before each chunk, [B chunks, G, rows, V]
    size: int  # tokens of a chunk
    init: bool  # whether the first chunk has a state
    last: Tensor | None  # behind the last chunk, float32 [B, G, rows, V]; None unless it is returned


class _Kept(NamedTuple):
    """Holds what two backwards of power attention with the same keys, values and gates share, see `states_again`."""

    s: Tensor
    z: Tensor
    gate: Gate
    chunk: int


def solve(
    k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor, _States | None]:
    """Returns the errors e and the updates u, [B, T, G, V] in the dtype of v, and the states between chunks.

    See `delta_solve.solve`. A row of one chunk has no states.
    """
    errors, update = torch.empty_like(v), torch.empty_like(v)
    tensors = {"source": v, "errors": errors, "update": update}
    size = _chunk_size(k, v, options)
    count = ceil_div(k.shape[1], size)
    states = _new_states(k, v, options.p, size, count) if count > 1 or state is not None else None
    last = _through_chunks(k, v, beta, log_g, options, size, tensors, states, state, count > 1 and options.return_state)
    if states is None or count == 1:
        return errors, update, None
    return errors, update, _States(states.flatten(0, 1), size, state is not None, last)


def solve_gradient(
    k: Tensor, errors: Tensor, beta: Tensor, log_g: Tensor | None, du: Tensor, options: DeltaOptions
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of v, in the memory of du, and of beta; see `delta_solve.solve_gradient`."""
    size, dv = _chunk_size(k, errors, options), du.contiguous()
    count = ceil_div(k.shape[1], size)
    parts = ceil_div(_columns(errors), _launches(k, errors)[1].step)
    dbeta = torch.empty(beta.shape[0], parts, *beta.shape[1:], device=beta.device, dtype=beta.dtype)
    # A token's gradient is read before that of its value is written.
    tensors = {"source": dv, "errors": errors, "update": dv, "dbeta": dbeta}
    states = _new_states(k, errors, options.p, size, 1) if count > 1 else None
    _through_chunks(k, errors, beta, log_g, options, size, tensors, states, None, False, later=True)
    return dv, dbeta.sum(1) if parts > 1 else dbeta[:, 0]


def _through_chunks(
    k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, options: DeltaOptions, size: int,
    tensors: dict[str, Tensor], states: Tensor | None, state: Tensor | None, final: bool, later: bool = False,
) -> Tensor | None:  # fmt: skip
    """Solves all chunks, from the last one on if `later`, with the arguments `tensors` of `solve_pass`.

    Solutions of a chunk leave most of a GPU idle, and what comes between them fills it. So with enough rows, there are
    two parts of the rows, each on a stream of its own.

    Args:
        k, v, beta, log_g, options: as for `_Chunks`.
        size: tokens of a chunk.
        tensors: for all rows.
        states: receives the states before each chunk [B, chunks, G, rows, V], or has room for one of each row, [B, 1,
            G, rows, V].
        state: the incoming state, as a caller gives it.
        final: whether the state behind the last chunk is returned.
        later: computes the gradients.

    Returns:
        The state behind the last chunk, float32 [B, G, rows, V]; None unless `final`.
    """
    batch, time, groups, _ = k.shape
    count = ceil_div(time, size)
    splits = count > 1 and batch > 1 and 2 * batch * groups >= processors(k.device)
    rows = [slice(0, batch // 2), slice(batch // 2, batch)] if splits else [slice(0, batch)]
    side = _side_stream(k.device) if splits and k.is_cuda else None
    streams = [None, side][: len(rows)]  # None: the current one
    launches = _launches(k, v)
    # Made on the current stream, so that its memory serves other calls afterwards.
    blocks = launches[1].block // BLOCK
    shape = batch, _rooms(time, size, launches[1].block), groups, blocks * (blocks + 1) // 2, BLOCK, BLOCK
    corrections = torch.empty(shape, device=k.device, dtype=torch.float32)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(k.device))
    parts = []
    for own, stream in zip(rows, streams, strict=True):
        given = {name: x[own] for name, x in tensors.items()}
        gates = None if log_g is None else log_g[own]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            chunks = _Chunks(k[own], beta[own], gates, given, corrections[own], options.p, size, launches, later)
            chunks.begin(None if states is None else states[own], None if state is None else state[own])
            parts.append(chunks)
    ordered = range(count)[::-1] if later else range(count)
    for number in ordered:
        more = number != ordered[-1]
        for stream, chunks in zip(streams, parts, strict=True):
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                chunks.solve(number, more or final)
                if more or final:
                    chunks.advance(number, more)
    if side is not None:
        torch.cuda.current_stream(k.device).wait_stream(side)
    lasts = [x.rows for x in parts if x.rows is not None]
    return None if not final else lasts[0] if len(lasts) == 1 else torch.cat(lasts)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _chunk_size(k: Tensor, v: Tensor, options: DeltaOptions) -> int:
    """Returns the tokens of a chunk, a multiple of BLOCK."""
    time, size = k.shape[1], options.chunk_size
    if size is None:
        size = time if time <= _ALONE or not power.has_states(options.p, k.shape[3]) else _CHUNK
    size = ceil_div(size, BLOCK) * BLOCK
    # The output reads the states of these chunks.
    return Shapes(k, k, v, None, options.p, size, False).chunk if size < time else size


def _rooms(time: int, size: int, span: int) -> int:
    """Returns for how many groups of `span` tokens of each row there is room for corrections."""
    return min(ceil_div(time, size), _AHEAD) * ceil_div(min(size, time), span)


def _columns(v: Tensor) -> int:
    return max(16, next_power_of_2(v.shape[3]))


def _launches(k: Tensor, v: Tensor) -> tuple[Launch, Launch]:
    heads = k.shape[0] * k.shape[2]
    return plan.delta_launches(padded_key_dim(k.shape[3]), _columns(v), v.dtype, k.device, heads)


def _new_states(k: Tensor, v: Tensor, p: int, size: int, count: int) -> Tensor:
    """Returns room for `count` states of each row, [B, count, G, rows, V]."""
    shapes = Shapes(k, k, v, None, p, size, False)
    shape = (k.shape[0], count, k.shape[2], shapes.row_count, v.shape[3])
    return torch.empty(shape, device=k.device, dtype=v.dtype)


def attend(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, states: _States | None,
    options: DeltaOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes power attention without a normalizer; see `delta_solve.attend`."""
    if states is not None:
        call = Call(q, k, u, log_g, None, options.p, 1.0, states.size, _tf32(u.dtype))
        out, _ = launch.output(call, states.before, None, states.init, False, 1.0, False)
        last = states.last if options.return_state else None
        return out, None if last is None else call.plan.rows.to_public(last)
    before = None if state is None else PowerState(state, state.new_zeros(state.shape[:3]), options.p, k.shape[3])
    out, after = power.attention(
        q, k, u, log_g, before, p=options.p, scale=1.0, normalize=False, eps=1.0, chunk_size=options.chunk_size,
        return_state=options.return_state,
    )  # fmt: skip
    return out, None if after is None else after.s


def attend_gradient(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, last: Tensor | None, dout: Tensor,
    dlast: Tensor | None, options: DeltaOptions, kept: _Kept | None = None,
) -> DeltaGradients:  # fmt: skip
    """Returns the gradients of `attend`; see `delta_solve.attend_gradient`.

    The states before chunks are kept for the next call, unless a last state has a gradient.
    """
    p, time, has_state = options.p, q.shape[1], state is not None or dlast is not None
    chunk = options.chunk_size if kept is None else kept.chunk
    if chunk is None:
        chunk = power.automatic_chunk_size(q, k, u, log_g, None, p, True, has_state)
    chunk = chunk if chunk < time else time if has_state else 0
    width, more = k.shape[3], None
    if not chunk:  # the quadratic form takes tiles of whole powers of two
        q, k = power.padded(q), power.padded(k)
    z = None if state is None or p != 2 else state.new_zeros(state.shape[:3])
    dz = None if dlast is None or p != 2 else dlast.new_zeros(dlast.shape[:3])
    empty = u.new_empty(0, dtype=torch.float32)
    result = power.Forward(u, empty, last, None, None, None, None, None)
    if kept is not None:
        result = result._replace(s_kept=kept.s, z_kept=kept.z, gate=kept.gate)
    elif chunk and chunk < time and dlast is None:
        same = Call(q, k, u, log_g, None, p, 1.0, chunk, _tf32(u.dtype), True)
        s, zs = power.states_again(same, state, z, False)
        more = _Kept(s, zs, same.gate, chunk)
        result = result._replace(s_kept=s, z_kept=zs, gate=same.gate, plan=same.plan)
    call = power.Options(p, 1.0, False, 1.0, chunk, dlast is not None, _tf32(u.dtype), False, True)
    dq, dk, du, dlog_g, ds, *_ = power.backward(
        dout, dlast, dz, q, k, u, log_g, state, z, None, None, result, call, kept is not None
    )  # fmt: skip
    return DeltaGradients(dq[..., :width], dk[..., :width], du, dlog_g, ds, more)


def key_gradient(k: Tensor, u: Tensor, dv: Tensor, parts: Sequence[Tensor], p: int) -> Tensor:
    """Returns the gradient of the keys; see `delta_solve.key_gradient`."""
    out, count, value_dim = torch.empty_like(k), k[..., 0].numel(), u.shape[3]
    widths = {"CHANNELS": next_power_of_2(k.shape[3]), "COLUMNS": next_power_of_2(value_dim)}
    constants = {"K": k.shape[3], "V": value_dim, "P": p, **widths}
    first, second, third = (x.contiguous() for x in parts)
    tensors = {"k": k.contiguous(), "u": u, "dv": dv, "first": first, "second": second, "third": third, "out": out}
    grid = (ceil_div(count, _ROWS),)
    launch_kernel(key_gradient_pass, grid, {"count": count, "BLOCK": _ROWS} | constants, **tensors)
    return out


class _Chunks:
    """Holds what the chunks of some rows share, and launches the kernels on one chunk after another.

    The launches of a chunk are prepared once. Other chunks change the addresses that differ. So the host takes little
    time for a chunk, and all chunks use the same memory for what is needed within one.

    Args:
        k: [B, T, G, K]. beta: [B, T, G]. log_g: [B, T, G], or None.
        tensors: other arguments of `solve_pass` for all tokens.
        corrections: room for what `group_corrections` computes, [B, room, G, pairs, BLOCK, BLOCK].
        p: the power. size: tokens of a chunk.
        launches: of `plan.delta_launches`.
        later: computes the gradients, from the last chunk on.
    """

    def __init__(
        self, k: Tensor, beta: Tensor, log_g: Tensor | None, tensors: dict[str, Tensor], corrections: Tensor, p: int,
        size: int, launches: tuple[Launch, Launch], later: bool,
    ):  # fmt: skip
        self.k, self.beta = power.padded(k).contiguous(), beta.contiguous()
        self.p, self.size, self.later = p, size, later
        self.given, values, self.corrections = k, tensors["source"], corrections
        self.batch, self.time, self.groups, self.key_dim = self.k.shape
        self.value_dim, self.dtype = values.shape[3], tensors["update"].dtype
        self.columns = _columns(values)
        self.log_g = None if log_g is None else log_g.contiguous()
        sums = None if self.log_g is None else self._sums(self.log_g, self.time, False)
        self.group_launch, self.solve_launch = launches
        # Two programs then fit on an SM.
        self.limit = {"maxnreg": 128} if self.group_launch is plan.HOPPER_DELTA[64][0] else {}
        self.parts = ceil_div(self.columns, self.solve_launch.step)
        # What one group starts from, and what groups read of others.
        span, longest = self.solve_launch.block, min(size, self.time)
        self.target = self._new(span, dtype=torch.float32)
        kept = (1, torch.float32) if self.dtype == torch.float32 else (2, torch.bfloat16)
        self.seen = torch.empty(kept[0], *self.target.shape, device=k.device, dtype=kept[1])
        self.faded = self._new(ceil_div(longest, span) * span)
        self.made: dict[Any, Any] = {}
        self.solutions: dict[tuple, tuple[list, dict]] = {}
        self.additions: dict[tuple, list[launch.Prepared]] = {}
        self.states = values.new_empty(0)  # see `begin`
        self.rows: Tensor | None = None  # the state before the next chunk, float32 [B, G, rows, V]
        gates = None if self.log_g is None or size >= self.time else self._gates(self.log_g)
        self.gates = () if gates is None else gates.unbind(0)
        # Three products of tf32 have nearly all digits of float32, and take less time than its own on Hopper.
        self.exact = "tf32x3" if self._precision == "tf32" and plan.on_hopper(k.device) else "ieee"
        self.corrected = range(0)  # the chunks whose corrections are there
        # What begins at a chunk is a view, because every number of an argument makes a launcher of its own.
        of_tokens = {"k": self.k, "beta": self.beta} | {n: x for n, x in tensors.items() if n != "dbeta"}
        self.views: dict[str, Sequence[Tensor]] = {name: x.split(size, 1) for name, x in of_tokens.items()}
        if sums is not None:
            self.views["sums"] = sums.split(size, 2)
        if "dbeta" in tensors:
            self.views["dbeta"] = tensors["dbeta"].split(size, 2)

    def begin(self, states: Tensor | None, state: Tensor | None) -> None:
        """Takes room for the states before chunks, [B, chunks or 1, G, rows, V], and a public incoming state."""
        if states is None:
            return
        self.states = states
        if state is not None:
            self.rows = power.from_public(self._shapes.rows, state, None)[0].float()
            states[:, 0].copy_(self.rows)

    def solve(self, number: int, more: bool) -> None:
        """Solves a chunk group by group, from the last one on for the gradients; see `solve_pass`.

        more: whether `advance` is called next.
        """
        count, read = self._count(number), None
        if self.rows is not None or more:
            first = number * self.size
            self._once(self._keys, count).copy_(self.given[:, first : first + count])
            if padded_key_dim(self.given.shape[3]) > self.given.shape[3]:  # calls take padded copies of the keys
                self.made.pop(("_reader", count), None)
                self.additions.clear()
        if self.rows is not None:
            (reader, given), read = self._once(self._reader, count)
            given["s"] = self._slot(number)
            reader(**given)
        recent = self._once(self._recent, count) if more else None
        key = (count, read is None, recent is None)
        if key not in self.solutions:
            self.solutions[key] = self._solution(count, read, recent)
        launches, given = self.solutions[key]
        for name, views in self.views.items():
            given[name] = views[number]
        given["corrections"] = self._corrections(number)
        of_groups = {name: given[name] for name in _OF_GROUPS} if len(launches) > 1 else {}
        for launcher, kernel in launches:
            launcher(**(given if kernel is solve_pass else of_groups))

    def advance(self, number: int, more: bool) -> None:
        """Computes the state behind a chunk, given the updates of the chunk.

        For the gradients, that is the negative of the gradient of the state before the chunk, given the gradients of
        the values. If `more`, another chunk follows, which finds a copy in `states`, in the dtype of the values.
        """
        count = self._count(number)
        key = (count, self.rows is None, more)
        if key not in self.additions:
            self.additions[key] = self._addition(number, count, more)
        (weigh, weighed), (add, added) = self.additions[key]
        if number < len(self.gates):
            weighed["sums"] = added["sums"] = self.gates[number]
        end = self._once(self._end, number % 2)
        added["s_final"] = end
        if self.rows is not None:
            added["s_init"] = self.rows
        if more:
            added["s_out"] = self._slot(number - 1 if self.later else number + 1)
        weigh(**weighed)
        add(**added)
        self.rows = end

    def _solution(self, count: int, read: Tensor | None, recent: Tensor | None) -> tuple[list, dict]:
        """Returns the launches of `solve` with their kernels, and their tensors, but those of `views`."""
        size, one = self.group_launch, self.solve_launch
        groups = range(0, count, one.block)
        joined = 1 < len(groups) <= _JOINED and self.key_dim <= _JOINED_DIM
        numbers = {"T": self.time, "count": count, "G": self.groups}
        constants: dict[str, Any] = {"K": self.key_dim, "V": self.value_dim, "COLUMNS": self.columns, "P": self.p}
        constants |= {"SPAN": one.block, "GATED": "sums" in self.views, "LATER": self.later}
        constants |= {"PRECISION": self._precision, "ROWS": size.block, "STEP": size.step, "STAGES": size.stages}
        own = {"room": self.corrections.shape[1], "FULL": self._joining}
        names = dict.fromkeys((*_OF_GROUPS, "seen", "beta", "corrections", "errors", "update", "recent", "dbeta"))
        given: dict[str, Tensor | None] = names | {name: views[0] for name, views in self.views.items()}
        given |= {"read": read, "target": self.target, "recent": recent, "corrections": self.corrections}
        given["seen"] = self.seen
        given["faded"] = self.faded if len(groups) > 1 else None
        grid = (self.batch, self.groups)
        solving = {"BLOCK": BLOCK, "WIDTH": min(one.step, self.columns), "JOINED": joined} | one.options
        ordered = groups[::-1] if self.later else groups
        launches = []
        for group in ordered[:1] if joined else ordered:
            alone = group == ordered[0]
            own_numbers = {"group": group} | numbers | constants
            if not alone:
                programs = (one.block // size.block, *grid)
                arguments = own_numbers | size.options | self.limit
                of_groups = {name: given[name] for name in _OF_GROUPS}
                launches.append((launcher_of(groups_pass, programs, arguments, of_groups), groups_pass))
            arguments = own_numbers | own | {"groups": len(groups), "ALONE": alone} | solving
            if joined:  # more rows together would need more registers than there are
                arguments["ROWS"] = min(BLOCK, size.block)
            launches.append((launcher_of(solve_pass, (*grid, self.parts), arguments, given), solve_pass))
        return launches, given

    def _corrections(self, number: int) -> Tensor:
        """Returns the corrections of a chunk. Those of other chunks that are next are computed with them, because one
        chunk has few programs."""
        chunks = min(ceil_div(self.time, self.size), _AHEAD)
        groups = self.corrections.shape[1] // chunks  # of a chunk
        if number not in self.corrected:
            first = max(0, number - chunks + 1) if self.later else number
            last = number if self.later else min(number + chunks, ceil_div(self.time, self.size)) - 1
            self.corrected = range(first, last + 1)
            begin = first * self.size
            count = ceil_div(min(self.time - begin, len(self.corrected) * self.size), BLOCK)
            size = ceil_div(min(self.size, self.time), BLOCK)
            numbers = {"T": self.time, "begin": begin, "size": size, "room": self.corrections.shape[1]}
            blocks = self.solve_launch.block // BLOCK
            constants = {"K": self.key_dim, "P": self.p, "BLOCK": BLOCK, "BLOCKS": blocks, "PRECISION": self._precision}
            tensors = {"k": self.k, "beta": self.beta, "out": self.corrections}
            arguments: dict[str, Any] = numbers | {"G": self.groups} | constants
            own = arguments | {"count": count, "FULL": self.exact, "num_warps": 1}
            launch_kernel(block_corrections, (self.batch * count, self.groups), own, **tensors)
            if blocks > 1:
                rooms = len(self.corrected) * groups
                own = arguments | {"groups": rooms, "FULL": self._joining, "num_warps": 4}
                launch_kernel(group_corrections, (self.batch * rooms, self.groups), own, **tensors)
        return self.corrections[:, (number - self.corrected[0]) * groups :]

    @property
    def _joining(self) -> str:
        """Returns the precision of products with corrections."""
        return "bf16x3" if self.dtype != torch.float32 else self.exact

    def _reader(self, count: int) -> tuple[launch.Prepared, Tensor]:
        """Returns the launch that computes phi(k) times the state, and its result, float32 [B, C, G, V]."""
        keys = self._once(self._keys, count)
        # The pass adds the outputs of values within the chunk, which are zeros here. As if a gate left no earlier
        # tiles of keys, it reads only those of a query's own tile.
        values = self._filled(0, self.value_dim, dtype=self.dtype).expand(*keys.shape[:3], -1)
        first = torch.arange(0, count, REACH_TILE.value, device=keys.device, dtype=torch.int32)
        gate = Gate(values.new_empty(0, dtype=torch.float32), first.repeat(self.groups * self.batch), None)
        call = Call(keys, keys, values, None, None, self.p, 1.0, count, self._tf32, gate=gate)
        prepared, out, _ = launch.output_launch(
            call, self.states[:, 0], None, True, False, 1.0, True, self.states.shape[1]
        )  # fmt: skip
        return prepared, out

    def _addition(self, number: int, count: int, more: bool) -> list[launch.Prepared]:
        """Returns the launches of `advance`, first of the pass that weighs keys."""
        keys, recent = self._once(self._keys, count), self._once(self._recent, count)
        gate = Gate(self.gates[number], None, None) if number < len(self.gates) else None
        first = number * self.size
        log_g = None if self.log_g is None else self.log_g[:, first : first + count]
        call = Call(keys, keys, recent, log_g, None, self.p, 1.0, count, self._tf32, gate=gate)
        shape = (self.groups, call.plan.layout.tokens)
        # Without a normalizer, the factors of outputs are 1, and its own gradients are 0.
        gradient = (recent, self._filled(1, *shape), self._filled(0, *shape)) if self.later else None
        ends = launch.new_ends(call, False)
        if more:
            s, z, after = self.states[:, 0], self.states.new_empty(0), self.states.shape[1]
        else:
            (s, z), after = launch.new_states(call, False), None
        z_init = self._filled(0, *ends[1].shape)  # where the pass computes Z with S, although nothing reads it
        return launch.state_launches(call, s, z, self.rows, z_init, ends, False, gradient, None, after)

    def _keys(self, count: int) -> Tensor:
        return self.given.new_empty(self.batch, count, *self.given.shape[2:])

    def _recent(self, count: int) -> Tensor:
        """Returns room for the updates of a chunk, [B, C, G, V]."""
        return self.states.new_empty(self.batch, count, self.groups, self.value_dim)

    def _end(self, _: int) -> Tensor:
        """Returns room for a state behind a chunk, float32 [B, G, rows, V]."""
        return self.states.new_empty(self.batch, *self.states.shape[2:], dtype=torch.float32)

    def _count(self, number: int) -> int:
        return min(self.size, self.time - number * self.size)

    def _slot(self, number: int) -> Tensor:
        """Returns the state before a chunk in `states`, [B, G, rows, V]."""
        return self.states[:, number if self.states.shape[1] > 1 else 0]

    def _filled(self, number: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of one number, which is made once."""
        key = (number, shape, dtype)
        if key not in self.made:
            self.made[key] = torch.full(shape, float(number), device=self.k.device, dtype=dtype)
        return self.made[key]

    def _once(self, make: Callable[..., T], *arguments: int) -> T:
        """Returns make(*arguments), which is made once for the same arguments."""
        key = (make.__name__, *arguments)
        if key not in self.made:
            self.made[key] = make(*arguments)
        return self.made[key]

    def _new(self, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (self.batch, self.groups, tokens, self.columns)
        return torch.empty(shape, device=self.k.device, dtype=dtype or self.dtype)

    @property
    def _shapes(self) -> Shapes:
        """Returns the shapes of calls of whole rows in these chunks."""
        y = self._filled(0, self.value_dim, dtype=self.dtype).expand(*self.given.shape[:3], -1)
        return Shapes(self.given, self.given, y, None, self.p, self.size, False)

    def _gates(self, log_g: Tensor) -> Tensor:
        """Returns the sums of `plan.Gate` of all whole chunks, as if they were rows, [chunks, parts, G, B C]."""
        count = self.time // self.size
        rows = log_g[:, : count * self.size].unflatten(1, (count, self.size)).transpose(0, 1).flatten(0, 1)
        sums = self._sums(rows.contiguous(), self.size, self._shapes.tiled)
        return sums.unflatten(2, (count, -1)).permute(2, 0, 1, 3).contiguous()

    def _sums(self, log_g: Tensor, time: int, tiled: bool) -> Tensor:
        """Returns log2 of the decay from the start of the chunk to each token, [2 or 3, G, tokens], see `gate_sums`, of
        contiguous rows of `time` tokens."""
        tokens = log_g.shape[0] * time
        sums = torch.empty(3 if tiled else 2, self.groups, tokens, device=log_g.device, dtype=torch.float32)
        numbers = {"T": time, "tokens": tokens, "G": self.groups, "CHUNK": self.size, "most": 0.0}
        chunks = log_g.shape[0] * ceil_div(time, self.size)
        heads = plan.heads_together(self.groups, chunks, processors(log_g.device))
        options = plan.sums_block(self.size, heads, False) | {"TILED": tiled, "PACKED": False, "OVERLAP": False}
        nothing = dict.fromkeys(("begins", "ends", "starts", "chunks"))
        grid = (chunks, self.groups // heads)
        launch_kernel(gate_sums, grid, numbers | options, log_g=log_g, sums=sums, **nothing)
        return sums

    @property
    def _tf32(self) -> bool:
        return _tf32(self.dtype)

    @property
    def _precision(self) -> str:
        return "tf32" if self._tf32 or self.dtype != torch.float32 else "ieee"


def _tf32(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32


# ------------------------------------------------------------------------------------------------- operator


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor | None]:
    """Computes what `power_delta_rule` promises, for inputs that it has checked and the kernels take."""
    dtype, (p, chunk, final), (key_dim, value_dim) = v.dtype, options, (q.shape[3], v.shape[3])
    if dtype == torch.float16:  # powers leave its range
        q, k, v = q.float(), k.float(), v.float()
    level_dim = plan.leveled_key_dim(key_dim, p, q.dtype, q.device)
    q, k = power.padded(q, level_dim), power.padded(k, level_dim)
    beta, gates = beta.float(), None if log_g is None else log_g.float()
    state = None if state is None else power.widened(state, key_dim, q.shape[3], p)
    widest = power.widest_values(level_dim is not None)
    outs, ends = [], []
    for first in range(0, value_dim, widest):
        part = power.padded(v[..., first : first + widest])
        before = None if state is None else power.padded(state[..., first : first + widest]).contiguous()
        out, last, *_ = power_delta(q, k, part.contiguous(), beta, gates, before, p, chunk or 0, final)
        width = min(widest, value_dim - first)
        outs.append(out[..., :width])
        ends.append(last[..., :width])
    out = (outs[0] if len(outs) == 1 else torch.cat(outs, -1)).to(dtype)
    if not final:
        return out, None
    return out, power.narrowed(torch.cat(ends, -1), key_dim, q.shape[3], p)


class _Backend:
    """Holds the functions of `DeltaBackend`."""

    solve, solve_gradient = staticmethod(solve), staticmethod(solve_gradient)
    attend, attend_gradient = staticmethod(attend), staticmethod(attend_gradient)
    key_gradient = staticmethod(key_gradient)


def _like_gradients(dout, dlast, q, k, v, beta, log_g, state, errors, update, last, p, chunk):
    grads = [torch.empty_like(x) for x in (q, k, v, beta)]
    return *grads, *(beta.new_empty(0) if x is None else torch.empty_like(x) for x in (log_g, state))


@operator(_like_gradients)
def power_delta_backward(
    dout: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None,
    state: Tensor | None,
    errors: Tensor,
    update: Tensor,
    last: Tensor,
    p: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k, v, beta, log_g and the incoming state; empty for what was not given."""
    with torch.cuda.device_of(q) if power.is_elsewhere(q) else nullcontext():
        options = DeltaOptions(p, chunk or None, dlast is not None)
        end = last if dlast is not None else None
        dout = dout.to(q.dtype).contiguous()
        found = delta_solve.backward(_Backend, q, k, beta, log_g, state, errors, update, end, dout, dlast, options)
    dq, dk, dv, dbeta, dlog_g, ds = (beta.new_empty(0) if x is None else x.contiguous() for x in found)
    return dq, dk, dv, dbeta, dlog_g, ds


def _like_forward(q, k, v, beta, log_g, state, p, chunk, final):
    out = q.new_empty(*q.shape[:3], v.shape[3])
    shape = (q.shape[0], k.shape[2], spow_dim(q.shape[3], p), v.shape[3]) if final else (0,) * 4
    return out, beta.new_empty(shape), torch.empty_like(v), torch.empty_like(v)


def _keep(ctx, inputs, output):
    q, k, v, beta, log_g, state, ctx.p, ctx.chunk, ctx.final = inputs
    _, last, errors, update = output
    ctx.save_for_backward(q, k, v, beta, log_g, state, errors, update, last)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlast, *_):
    q, k, v, beta, log_g, state, errors, update, last = ctx.saved_tensors
    if dout is None:
        dout = q.new_zeros(*q.shape[:3], v.shape[3])
    dlast = dlast if ctx.final else None
    tensors = (q, k, v, beta, log_g, state, errors, update, last)
    *grads, dlog_g, ds = power_delta_backward(dout, dlast, *tensors, ctx.p, ctx.chunk)
    return *grads, None if log_g is None else dlog_g, None if state is None else ds, None, None, None


@operator(_like_forward, _keep, _backward)
def power_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None,
    state: Tensor | None,
    p: int,
    chunk: int,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes out [B, T, H, V], the last state [B, G, D, V], empty unless `final`, errors and updates [B, T, G, V].

    chunk: tokens of a chunk; 0: the kernels choose.
    """
    with torch.cuda.device_of(q) if power.is_elsewhere(q) else nullcontext():
        options = DeltaOptions(p, chunk or None, final)
        out, last, errors, update = delta_solve.forward(_Backend, q, k, v, beta, log_g, state, options)
    return out, beta.new_empty((0,) * 4) if last is None else last, errors, update
