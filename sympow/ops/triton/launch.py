"""The launches of one call: a function for each stage, first states and output, then gradients. Only this file decides
which kernel a stage takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.ops.runtime.launcher import Launcher, ceil_div, next_power_of_2
from sympow.ops.triton import gate, gradients
from sympow.ops.triton import output as plain_output
from sympow.ops.triton import states as plain_states
from sympow.ops.triton.hopper import gradients_quadratic, key_gradient_levels, query_gradient_levels, states_levels
from sympow.ops.triton.hopper import key_gradient as hopper_key_gradient
from sympow.ops.triton.hopper import output as hopper_output
from sympow.ops.triton.hopper import query_gradient as hopper_query_gradient
from sympow.ops.triton.hopper import states as hopper_states
from sympow.ops.triton.levels import TILE
from sympow.ops.triton.plan import THREE_PROGRAMS, WEIGH_BLOCK, Call, Plan, heads_together
from sympow.ops.triton.segments import Segments, few, join_blocks, join_launcher, segments_of

# Tokens of a block of the gate's gradient: along whole rows, and within chunks, those of all heads of a program.
GATE_BLOCK, SHORT_GATE_BLOCK = 1024, 256
STATE_BLOCK, STATE_PARTS = 2048, 8  # of `through_states`: elements read together, and programs of one state


Prepared = tuple[Launcher, dict[str, Tensor | None]]  # a launch and its tensors by name


def output(
    call: Call, s: Tensor | None, z: Tensor | None, init: bool, normalize: bool, eps: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, H, V], float32 if `wide`, and the normalizer [H, B T], empty unless `normalize`, from the
    states before each chunk. `init` tells that the first of them is not zero."""
    (launch, tensors), out, norm = output_launch(call, s, z, init, normalize, eps, wide, call.plan.row_chunks)
    launch(**tensors)
    return out, norm


def output_launch(
    call: Call, s: Tensor | None, z: Tensor | None, init: bool, normalize: bool, eps: float, wide: bool,
    row_states: int,
) -> tuple[Prepared, Tensor, Tensor]:  # fmt: skip
    """Returns the launch of `output`, and its results. row_states: states from the first of a row to that of the next
    one."""
    plan, q, k, v = call.plan, call.q, call.k, call.v
    out = plan.new(*q.shape[:3], plan.V, dtype=torch.float32 if wide else plan.dtype)
    norm = plan.new_rows(plan.H if normalize else 0)
    launch, size = plan.once(OUTPUT[plan.variant], init, normalize, eps, wide, row_states), plan.config.output
    if plan.variant != "plain":
        s, z, size = out if s is None else s, out if z is None else z, plan.hopper_launches.output
    tensors = {"q": q, "k": k, "v": v, "out": out, "norm": norm, "sums": call.gate.sums, "reach": call.gate.begins,
               "s": s, "z": z, **call.sequences(size.block)}  # fmt: skip
    return (launch, tensors), out, norm


def _output(plan: Plan, init: bool, normalize: bool, eps: float, wide: bool, row_states: int) -> Launcher:
    size, (prefixes, weights, *_) = plan.config.output, plan.tables
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.counts()
    numbers |= {"score_scale": plan.score_scale, "out_scale": plan.out_scale, "eps": eps}
    numbers |= {"row_states": row_states}
    constants = plan.dims() | {"BLOCK": size.block, "KEYS": size.step, "PACKED": plan.layout.packed}
    constants |= {"NORMALIZE": normalize, "STATES": plan.has_rows(init), "INIT": init}
    tables = {"prefixes": prefixes, "weights": weights}
    grid = (plan.layout.blocks(size.block), plan.H)
    return Launcher(plain_output.output_pass, grid, numbers | constants | tables | size.options)


def _output_on_hopper(plan: Plan, init: bool, normalize: bool, eps: float, wide: bool, row_states: int) -> Launcher:
    size = plan.hopper_launches.output
    levels: tuple = plan.levels.shape if plan.variant == "levels" else ()
    prefixes, weights = plan.tables[1:3] if levels else (None, None)
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.spread(size, plan.H)
    numbers |= {"out_scale": plan.out_scale, "eps": eps, "row_states": row_states}
    constants = plan.hopper_dims(size) | {"P": plan.p, "LEVELS": levels}
    constants |= {"SKIP": plan.skip, "KEYS": size.step, "NORMALIZE": normalize}
    constants |= {"STATES": plan.has_rows(init), "INIT": init} | plan.early(after=plan.gated)
    if plan.of_two and plan.chunk and plan.K == 32:  # needs two registers more with a gate
        constants["maxnreg"] = THREE_PROGRAMS
    tables = {"prefixes": prefixes, "weights": weights}
    grid = (plan.layout.blocks(size.block), plan.H)
    return Launcher(hopper_output.output_pass, grid, numbers | constants | tables)


def new_ends(call: Call, z: bool, segments: int = 1) -> tuple[Tensor, Tensor]:
    """Allocates the last S [N segments, G, rows, V] and Z [N segments, G, K, K], float32."""
    s_end, z_end = (
        torch.empty(count * segments, *shape, device=call.plan.device, dtype=torch.float32)
        for count, *shape in call.plan.end_shapes(z)
    )
    return s_end, z_end


def new_states(call: Call, z: bool, more: int = 0) -> tuple[Tensor, Tensor]:
    """Allocates S [chunks + more, G, rows, V] and Z [chunks + more, G, K, K]; Z is empty if it is not used."""
    plan = call.plan
    s, zs = (
        torch.empty(chunks and chunks + more, *shape, device=plan.device, dtype=plan.dtype)
        for chunks, *shape in plan.state_shapes(z)
    )
    return s, zs


class ForwardStates(NamedTuple):
    """Holds the states that the reverse state pass multiplies with the gradients of states."""

    s: Tensor  # S and Z at the boundaries where it computes gradients, those after each chunk
    z: Tensor
    products: Tensor  # result, float64 [chunks, G, parts]: inner products at all boundaries but the last


def new_products(call: Call, z: bool) -> Tensor:
    """Allocates the products of `ForwardStates`: the gradient of the gate's sums at the ends of chunks, in parts."""
    plan, device = call.plan, call.plan.device
    shape = (plan.layout.blocks(plan.chunk), plan.G)
    if plan.once(_segments, z).count > 1:  # part 0 is that of the state pass, and others may change nothing
        return torch.zeros(*shape, 1 + join_blocks(plan, z or plan.of_two), device=device, dtype=torch.float64)
    return torch.empty(*shape, _state_programs(plan, z), device=device, dtype=torch.float64)


def states(
    call: Call, s_init: Tensor | None, z_init: Tensor | None, ends: tuple[Tensor, Tensor] | None, z: bool,
    gradient: tuple[Tensor, Tensor, Tensor] | None = None, room: tuple[Tensor, Tensor] | None = None,
    forward: ForwardStates | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns S [chunks, G, rows, V] and Z [chunks, G, K, K] at the boundaries of chunks, in `room` if that is given.
    The last ones are written to `ends`.

    If `gradient` is given, (dout, factor, delta), the pass runs in reverse and computes the gradients of the states. S
    and Z of `forward` may be `room`; the gradients then replace them, unless rows are divided into segments.
    """
    plan = call.plan
    segments, reverse = plan.once(_segments, z), gradient is not None
    divided = segments.count > 1
    # `join` multiplies the states of the forward with those of whole rows, so it must not find them replaced.
    s, zs = new_states(call, z) if room is None or (divided and forward is not None) else room
    if not divided:
        _run(state_launches(call, s, zs, s_init, z_init, ends, z, gradient, forward))
        return s, zs
    finals, own = new_ends(call, z, segments.count), forward
    if forward is not None:
        shape = (*forward.products.shape[:2], _state_programs(plan, z))
        own = forward._replace(products=torch.zeros(shape, device=plan.device, dtype=torch.float64))
    _run(state_launches(call, s, zs, None, None, finals, z, gradient, own))
    if forward is not None and own is not None:
        forward.products[..., 0] = own.products.sum(2)
    (s_end, z_end), (s_other, z_other, products) = ends or (None, None), forward or (None, None, None)
    has_z = zs.numel() > 0
    inits = s_init is not None, z_init is not None and has_z
    launch = plan.once(_join, z, has_z, *inits, ends is not None, products is not None, reverse)
    launch(
        s=s, z=zs if has_z else None, s_finals=finals[0], z_finals=finals[1] if has_z else None,
        s_init=s_init, z_init=z_init if has_z else None, s_end=s_end, z_end=z_end if has_z else None,
        s_other=s_other, z_other=z_other if has_z else None, products=products, sums=call.gate.sums,
        weights=None if products is None else plan.rows.shares_on(plan.device),
    )  # fmt: skip
    return s, zs


def _join(plan: Plan, z: bool, *given: bool) -> Launcher:
    return join_launcher(plan, plan.once(_segments, z), *given)


def _run(launches: list[Prepared]) -> None:
    for launch, tensors in launches:
        launch(**tensors)


def state_launches(
    call: Call, s: Tensor, zs: Tensor, s_init: Tensor | None, z_init: Tensor | None,
    ends: tuple[Tensor, Tensor] | None, z: bool, gradient: tuple[Tensor, Tensor, Tensor] | None,
    forward: ForwardStates | None, after: int | None = None,
) -> list[Prepared]:  # fmt: skip
    """Returns the launches that compute what `states` returns into s and zs, for segments instead of rows if rows are
    divided.

    If `after` is given, every row is one chunk, and S is that after it (before it, in reverse), at every `after`-th
    state of the memory that begins at s. Z is not written then.
    """
    plan = call.plan
    x, y = (call.k, call.v) if gradient is None else (call.q, gradient[0])
    norm, delta = (None, None) if gradient is None else gradient[1:]
    reverse, segments = gradient is not None, plan.once(_segments, z)
    starts, chunk_starts, blocks = segments.starts, segments.chunk_starts, segments.blocks
    if segments.count == 1:
        starts, chunk_starts, blocks = call.cu_seqlens, call.chunk_starts(), call.table(_weigh_block(plan))
    xt = torch.empty(weighed_shape(plan, reverse, z), device=plan.device, dtype=plan.dtype)
    weigh = plan.once(_weigh, reverse, z)
    weighed = {"x": x, "sums": call.gate.sums, "norm": norm, "delta": delta, "out": xt, "starts": starts}
    weighed |= {"blocks": blocks}

    init, final = s_init is not None, ends is not None
    s_init, z_init = (s, zs) if s_init is None else (s_init, zs if z_init is None else z_init)
    s_final, z_final = (s, zs) if ends is None else ends
    tensors: dict[str, Tensor | None] = {"xt": xt, "y": y, "sums": call.gate.sums}
    tensors |= {"s_out": s, "s_init": s_init, "s_final": s_final}
    tensors |= {"starts": starts, "chunk_starts": chunk_starts}
    launch = plan.once(STATES[plan.variant], reverse, init, final, z, after)
    if plan.variant == "levels":  # whose rows have the transposed keys, and which have no Z
        return [(weigh, weighed), (launch, tensors)]
    tensors |= {"x": x, "z_out": zs, "z_init": z_init, "z_final": z_final}
    tensors |= dict(zip(("s_forward", "z_forward", "products"), forward or (None,) * 3, strict=True))
    return [(weigh, weighed), (launch, tensors)]


def _weigh_block(plan: Plan) -> int:
    return min(WEIGH_BLOCK, plan.chunk)


def weighed_shape(plan: Plan, reverse: bool, z: bool) -> tuple[int, int]:
    """Returns the shape of the transposed keys (queries in reverse). The state pass may read past the last row."""
    block, heads = _weigh_block(plan), plan.H if reverse else plan.G
    sequences = plan.layout.sequences * plan.once(_segments, z).count
    stride = (ceil_div(plan.layout.tokens, block) + sequences) * block
    return heads * (2 * plan.K + 1 if plan.p > 2 else plan.K + 1) + 16, stride


def _sources(plan: Plan, reverse: bool) -> dict[str, Any]:
    """Returns the strides by token and head of k and v, or of q and the output's gradient, which is contiguous."""
    own = plan.strides
    if reverse:
        return {"x_st": own["q_st"], "x_sh": own["q_sh"], "y_st": plan.H * plan.V, "y_sh": plan.V}
    return {"x_st": own["k_st"], "x_sh": own["k_sh"], "y_st": own["v_st"], "y_sh": own["v_sh"]}


def _weigh(plan: Plan, reverse: bool, z: bool) -> Launcher:
    block, heads = _weigh_block(plan), plan.H if reverse else plan.G
    sources, segments = _sources(plan, reverse), plan.once(_segments, z)
    numbers = plan.sequences() | {"x_st": sources["x_st"], "x_sh": sources["x_sh"], "R": heads // plan.G}
    numbers |= {"stride": weighed_shape(plan, reverse, z)[1], "weight": plan.out_scale}
    constants = {"K": plan.K, "P": plan.p, "BLOCK": block, "CHUNK": plan.chunk, "GATED": plan.gated}
    constants |= {"TILED": plan.tiled, "REVERSE": reverse, "PACKED": plan.layout.packed or segments.count > 1}
    count = plan.layout.blocks(block) if segments.blocks is None else len(segments.blocks)
    return Launcher(plain_states.weigh, (count, heads), numbers | constants)


def _state_arguments(
    plan: Plan, reverse: bool, init: bool, final: bool, z: bool, after: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the numbers and constants that all state passes take. Segments are documents to them."""
    segments = plan.once(_segments, z)
    numbers = plan.sequences() | {"G": plan.G, "stride": weighed_shape(plan, reverse, z)[1]}
    numbers |= {"row_states": after or plan.row_chunks}
    packed = plan.layout.packed or segments.count > 1
    constants = {"R": plan.R if reverse else 1, "REVERSE": reverse, "PACKED": packed, "INIT": init}
    constants |= {"AFTER": after is not None}
    return numbers, constants | {"FINAL": final, "ALIGN": _weigh_block(plan), "CHUNK": plan.chunk, "GATED": plan.gated}


def _state_grid(plan: Plan, programs: int, z: bool) -> tuple[int, int, int]:
    return programs, plan.G, plan.layout.sequences * plan.once(_segments, z).count


def _segments(plan: Plan, z: bool) -> Segments:
    """Returns the segments of rows in the state pass, chosen by its number of programs with all their tiles."""
    return segments_of(plan, _programs_of_tiles(plan, z, _most_tiles(plan)), _weigh_block(plan))


def _most_tiles(plan: Plan) -> int:
    if plan.variant == "levels":
        return min(plan.hopper_launches.state.block, 128 // plan.V)
    return (plan.hopper_launches if plan.variant == "hopper" else plan.config).state.block


def _state_tiles(plan: Plan, z: bool) -> int:
    """Returns the number of tiles of rows of a program of the state pass."""
    most = _most_tiles(plan)
    if plan.variant != "hopper" or plan.once(_segments, z).count > 1:
        return most
    programs = _programs_of_tiles(plan, z, most) * plan.G * plan.layout.sequences
    return 2 if few(programs, plan.processors) else most


def _state_programs(plan: Plan, z: bool) -> int:
    """Returns the number of programs of the state pass for one key/value head of one sequence."""
    return _programs_of_tiles(plan, z, _state_tiles(plan, z))


def _programs_of_tiles(plan: Plan, z: bool, tiles: int) -> int:
    """Returns the number of these programs if each has so many tiles."""
    if plan.variant == "levels":
        return states_levels.programs(plan.levels.shape, tiles, plan.hopper_launches.state.warps)
    if plan.variant == "hopper":
        size = plan.hopper_launches.state
        return hopper_states.programs(plan.K, plan.parts, tiles, size.tile, size.warps)
    counts, narrow, least = plan.counts(), plan.K - plan.half, 64  # rows of a product
    programs = int(z) + ceil_div(counts["lower"], tiles * max(1, least // plan.K))
    return programs + (ceil_div(counts["upper"], tiles * max(1, least // narrow)) if counts["upper"] else 0)


def _states(plan: Plan, reverse: bool, init: bool, final: bool, z: bool, after: int | None) -> Launcher:
    size = plan.config.state
    numbers, constants = _state_arguments(plan, reverse, init, final, z, after)
    numbers |= _sources(plan, reverse) | plan.counts()
    constants = plan.dims() | constants | {"TILES": _state_tiles(plan, z), "STEP": size.step, "Z": z}
    arguments = numbers | constants | {"prefixes": plan.tables[0]} | size.options
    return Launcher(plain_states.state_pass, _state_grid(plan, _state_programs(plan, z), z), arguments)


def _states_on_hopper(plan: Plan, reverse: bool, init: bool, final: bool, z: bool, after: int | None) -> Launcher:
    size = plan.hopper_launches.state
    numbers, constants = _state_arguments(plan, reverse, init, final, z, after)
    constants |= {"K": plan.K, "V": plan.V, "PARTS": plan.parts, "TILES": _state_tiles(plan, z)}
    constants |= {"WIDTH": size.tile, "STEP": size.step, "STAGES": size.stages, "num_warps": size.warps}
    if constants["TILES"] == 2 and plan.K <= 64:
        constants["maxnreg"] = THREE_PROGRAMS
    grid = _state_grid(plan, _state_programs(plan, z), z)
    return Launcher(hopper_states.state_pass, grid, numbers | _sources(plan, reverse) | constants)


def _states_by_levels(plan: Plan, reverse: bool, init: bool, final: bool, z: bool, after: int | None) -> Launcher:
    size, levels = plan.hopper_launches.state, plan.levels.shape
    tiles = _most_tiles(plan)
    numbers, constants = _state_arguments(plan, reverse, init, final, z, after)
    sources = _sources(plan, reverse)
    numbers |= {"y_st": sources["y_st"], "y_sh": sources["y_sh"]}
    constants |= {"K": plan.K, "V": plan.V, "P": plan.p, "LEVELS": levels, "TILES": tiles}
    constants |= {"STEP": size.step, "STAGES": size.stages, "num_warps": size.warps}
    grid = _state_grid(plan, _programs_of_tiles(plan, z, tiles), z)
    return Launcher(states_levels.state_pass, grid, numbers | constants | {"prefixes": plan.tables[0]})


class RowFactors(NamedTuple):
    """Holds the factors of every query, float32 [H, B T]; see `row_factors` in `gradients.py`."""

    factor: Tensor  # the factor of the output's gradient
    scales: Tensor  # log2 of `near`; only for passes that read it
    near: Tensor  # the factor with scale and the decay within a tile of the gate's sums; likewise
    delta: Tensor  # the part of the query in the gradient of the normalizer


def row_factors(call: Call, dout: Tensor, out: Tensor, norm: Tensor, normalize: bool, early: bool = True) -> RowFactors:
    """Returns what all passes of the backward read of the outputs and their gradients [B, T, H, V]. `early` tells, for
    calls with a gate, that the launch before this one computed the sums of the gate."""
    plan = call.plan
    factor, delta = plan.new_rows(plan.H), plan.new_rows(plan.H)
    scales, near = (
        (plan.new_rows(plan.H), plan.new_rows(plan.H)) if plan.variant == "hopper_quadratic" else (factor, factor)
    )
    launch = plan.once(_row_factors, normalize, early)
    launch(
        out=out, dout=dout, norm=norm, sums=call.gate.sums, factor=factor, scales=scales, near=near, delta=delta,
        starts=call.cu_seqlens, blocks=call.table(WEIGH_BLOCK),
    )  # fmt: skip
    return RowFactors(factor, scales, near, delta)


def _row_factors(plan: Plan, normalize: bool, early: bool) -> Launcher:
    numbers = plan.sequences() | {"H": plan.H, "out_scale": plan.out_scale}
    constants = {"V": plan.V, "COLUMNS": plan.columns, "R": plan.R, "BLOCK": WEIGH_BLOCK, "GATED": plan.gated}
    constants |= {"NORMALIZE": normalize, "TILED": plan.variant == "hopper_quadratic"}
    constants |= {"PACKED": plan.layout.packed} | plan.early(plan.gated)
    if not early:  # the same code, launched without overlap
        constants.pop("launch_pdl", None)
    return Launcher(gradients.row_factors, (plan.layout.blocks(WEIGH_BLOCK), plan.H), numbers | constants)


def query_gradient(
    call: Call, dout: Tensor, factors: RowFactors, s: Tensor | None, z: Tensor | None, init: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dq and the queries' part in the gradient of the gate's sums, [H, B T] (empty without a gate), from the
    states before each chunk. `init` tells that the first of them is not zero."""
    plan, q, k, v = call.plan, call.q, call.k, call.v
    dq, dsums = plan.new(*q.shape), plan.new_rows(plan.H if plan.gated else 0)
    tensors: dict[str, Tensor | None] = {"q": q, "dout": dout, "sums": call.gate.sums, "dq": dq, "dsums": dsums}
    launch = plan.once(QUERY_GRADIENT[plan.variant], init, normalize)
    of_queries: dict[str, Tensor | None] = {"factor": factors.factor, "delta": factors.delta, "reach": call.gate.begins}
    if plan.variant == "hopper_quadratic":
        launch(keys=k, values=v, **tensors, **of_queries)
        return dq, dsums
    tensors |= {"k": k, "v": v, "s": s}
    if plan.variant == "levels":
        launch(**tensors, **call.sequences(plan.hopper_launches.query.block))
        return call.own_channels(dq), dsums
    tensors |= {"z": z} | of_queries
    size = plan.config.query
    if plan.variant == "hopper":
        tensors |= {"s": dq if s is None else s, "z": dq if z is None else z}
        size = plan.hopper_launches.query
    launch(**tensors, **call.sequences(size.block))
    return call.own_channels(dq), dsums


def _quadratic_query_gradient(plan: Plan, init: bool, normalize: bool) -> Launcher:
    size, own, time = plan.hopper_launches.query, plan.strides, plan.layout.length
    numbers = plan.sequences() | plan.spread(size, plan.H) | {"q_st": own["q_st"], "q_sh": own["q_sh"], "H": plan.H}
    numbers |= {"grad_scale": plan.grad_scale * plan.out_scale}
    constants = {"K": plan.K, "V": plan.V, "R": plan.R, "BLOCK": size.block, "KEYS": size.step, "GATED": plan.gated}
    constants |= {"num_warps": size.warps} | plan.early()
    tiles = {
        name: gradients_quadratic.key_tile((plan.layout.sequences, time, plan.G, width), own[st], own[sh], size.step)
        for name, st, sh, width in (("keys", "k_st", "k_sh", plan.K), ("values", "v_st", "v_sh", plan.V))
    }
    grid = (plan.layout.blocks(size.block), plan.H)
    return Launcher(gradients_quadratic.query_pass, grid, numbers | constants, tiles)


def _query_gradient_by_levels(plan: Plan, init: bool, normalize: bool) -> Launcher:
    size, (rows, entries) = plan.hopper_launches.query, plan.slopes()
    numbers = plan.strides | plan.sequences() | plan.heads() | {"grad_scale": plan.grad_scale * plan.out_scale}
    constants = plan.leveled_dims(size) | {"KEYS": size.step, "STATES": plan.has_rows(init), "INIT": init}
    arguments = numbers | constants | {"rows": rows, "entries": entries}
    return Launcher(query_gradient_levels.query_pass, (plan.layout.blocks(size.block), plan.H), arguments)


def _query_gradient_on_hopper(plan: Plan, init: bool, normalize: bool) -> Launcher:
    size = plan.hopper_launches.query
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.spread(size, plan.H)
    numbers |= {"grad_scale": plan.grad_scale * plan.out_scale}
    constants = plan.hopper_dims(size) | {"HALF": plan.half, "KEYS": size.step, "NORMALIZE": normalize}
    grid = (plan.layout.blocks(size.block), plan.H)
    constants |= {"STATES": plan.has_rows(init), "INIT": init} | plan.early()
    return Launcher(hopper_query_gradient.query_pass, grid, numbers | constants)


def _query_gradient(plan: Plan, init: bool, normalize: bool) -> Launcher:
    size, (prefixes, _, weights, mirror) = plan.config.query, plan.tables
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.counts()
    numbers |= {"score_scale": plan.score_scale, "grad_scale": plan.grad_scale * plan.out_scale}
    constants = plan.dims() | {"BLOCK": size.block, "KEYS": size.step, "NORMALIZE": normalize, "TILED": plan.tiled}
    constants |= {"STATES": plan.has_rows(init), "INIT": init, "PACKED": plan.layout.packed}
    tables = {"prefixes": prefixes, "weights": weights, "mirror": mirror}
    grid = (plan.layout.blocks(size.block), plan.H)
    return Launcher(gradients.query_pass, grid, numbers | constants | tables | size.options)


def key_gradient(
    call: Call, dout: Tensor, factors: RowFactors, ds: Tensor | None, dz: Tensor | None, final: bool,
    z: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dk, dv and the keys' part in the gradient of the gate's sums, [G, B T] (empty without a gate), from the
    gradients of the states after each chunk. `final` tells that the last of them is not zero, `z` that dz is read."""
    plan, q, k, v = call.plan, call.q, call.k, call.v
    dk, dv = plan.new(*k.shape), plan.new(*v.shape)
    dsums = plan.new_rows(plan.G if plan.gated else 0)
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "dout": dout, "sums": call.gate.sums}
    tensors |= {"dk": dk, "dv": dv, "dsums": dsums}
    launch, size = plan.once(KEY_GRADIENT[plan.variant], final, z), plan.config.key
    if plan.variant in ("hopper", "hopper_quadratic", "levels"):
        size = plan.hopper_launches.key
    if plan.variant == "hopper":
        ds, dz = dk if ds is None else ds, dk if dz is None else dz
    if plan.variant != "levels":
        tensors |= {"delta": factors.delta, "reach": call.gate.ends}
    if plan.variant == "hopper_quadratic":
        tensors |= {"scales": factors.scales, "near": factors.near}
    elif plan.variant == "levels":
        tensors |= {"ds": ds}
    else:
        tensors |= {"factor": factors.factor, "ds": ds, "dz": dz}
    launch(**tensors, **call.sequences(size.block))
    return call.own_channels(dk), dv, dsums


def _quadratic_key_gradient(plan: Plan, final: bool, z: bool) -> Launcher:
    size = plan.hopper_launches.key
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.spread(size, plan.G)
    numbers |= {"grad_scale": plan.grad_scale}
    constants = {"K": plan.K, "V": plan.V, "R": plan.R, "BLOCK": size.block, "QUERIES": size.step}
    constants |= {"GATED": plan.gated, "num_warps": size.warps} | plan.early()
    return Launcher(gradients_quadratic.key_pass, (plan.layout.blocks(size.block), plan.G), numbers | constants)


def _key_gradient_by_levels(plan: Plan, final: bool, z: bool) -> Launcher:
    size, (rows, entries), (_, level_entries, weights) = plan.hopper_launches.key, plan.slopes(), plan.tables
    numbers = plan.strides | plan.sequences() | plan.heads()
    numbers |= {"out_scale": plan.out_scale, "grad_scale": plan.grad_scale}
    constants = plan.leveled_dims(size) | {"LEVELS": plan.levels.shape, "TILE": TILE, "QUERIES": size.step}
    tables = {"rows": rows, "entries": entries, "level_entries": level_entries, "weights": weights}
    grid = (plan.layout.blocks(size.block), plan.G)
    flags = {"STATES": plan.has_rows(final), "FINAL": final}
    return Launcher(key_gradient_levels.key_pass, grid, numbers | constants | tables | flags)


def _key_gradient_on_hopper(plan: Plan, final: bool, z: bool) -> Launcher:
    size = plan.hopper_launches.key
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.spread(size, plan.G)
    numbers |= {"out_scale": plan.out_scale, "grad_scale": plan.grad_scale}
    constants = plan.hopper_dims(size) | {"HALF": plan.half, "QUERIES": size.step, "STATES": plan.has_rows(final)}
    grid = (plan.layout.blocks(size.block), plan.G)
    constants |= {"FINAL": final, "Z": z} | plan.early()
    return Launcher(hopper_key_gradient.key_pass, grid, numbers | constants)


def _key_gradient(plan: Plan, final: bool, z: bool) -> Launcher:
    size, (prefixes, weights, grad_weights, mirror) = plan.config.key, plan.tables
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.counts()
    numbers |= {"score_scale": plan.score_scale, "out_scale": plan.out_scale, "grad_scale": plan.grad_scale}
    constants = plan.dims() | {
        "BLOCK": size.block,
        "QUERIES": size.step,
        "STATES": plan.has_rows(final),
        "FINAL": final,
    }
    constants |= {"Z": z, "PACKED": plan.layout.packed, "TILED": plan.tiled}
    tables = {"prefixes": prefixes, "weights": weights, "grad_weights": grad_weights, "mirror": mirror}
    grid = (plan.layout.blocks(size.block), plan.G)
    return Launcher(gradients.key_pass, grid, numbers | constants | tables | size.options)


def through_states(call: Call, s: Tensor, z: Tensor | None, ds: Tensor, dz: Tensor | None, reads_z: bool) -> Tensor:
    """Returns the gradient of the gate's sums at the end of every chunk but the last, in parts, float64 [chunks, G,
    STATE_PARTS], from the states before each chunk and the gradients of those after."""
    plan = call.plan
    through = torch.empty(s.shape[0], plan.G, STATE_PARTS, device=plan.device, dtype=torch.float64)
    launch = plan.once(_through_states, reads_z)
    launch(s=s, ds=ds, z=z, dz=dz, through=through, starts=call.cu_seqlens, chunks=call.table(plan.chunk))
    return through


def _through_states(plan: Plan, reads_z: bool) -> Launcher:
    numbers = {"T": plan.layout.length, "G": plan.G, "rows": plan.row_count}
    constants = {"K": plan.K, "V": plan.V, "CHUNK": plan.chunk, "BLOCK": STATE_BLOCK, "Z": reads_z}
    constants |= {"PACKED": plan.layout.packed}
    grid = (plan.layout.blocks(plan.chunk), plan.G, STATE_PARTS)
    weights = {"weights": plan.rows.shares_on(plan.device)}
    return Launcher(gate.through_states, grid, numbers | constants | weights)


def gate_gradient(
    call: Call, log_g: Tensor, dsums_q: Tensor, dsums_k: Tensor, last: Tensor | None, through: Tensor | None = None
) -> Tensor:
    """Returns the gradient [B, T, G] of log_g, float32, from the gradients of its sums by queries [H, B T], by keys
    [G, B T], by the last state [N, G], and from `through_states`.

    Without the last, there are two passes, because a row of many tokens has few heads. The first sums blocks, and the
    second sums the tokens after each token within a block. A row of one block needs only the second pass.
    """
    plan = call.plan
    dlog_g = plan.new(*call.k.shape[:3], dtype=torch.float32)
    terms = {"dq_sums": dsums_q, "dk_sums": dsums_k}
    log_g = log_g.float().contiguous()
    if through is not None:
        launch = plan.once(_gate_gradient_by_chunk, last is not None, through.shape[2], SHORT_GATE_BLOCK)
        tables = {"starts": call.cu_seqlens, "chunks": call.table(plan.chunk)}
        launch(**terms, through=through, last=last, log_g=log_g, dlog_g=dlog_g, **tables)
        return dlog_g
    many = plan.layout.length > GATE_BLOCK
    blocks = plan.layout.blocks(GATE_BLOCK) if many else 0
    totals = torch.empty(plan.G, blocks, device=plan.device, dtype=torch.float64)
    tables = {"starts": call.cu_seqlens, "blocks": call.table(GATE_BLOCK)}
    if many:
        plan.once(_gate_totals, GATE_BLOCK)(**terms, totals=totals, **tables)
    launch = plan.once(_gate_gradient, last is not None, GATE_BLOCK)
    launch(**terms, totals=totals, last=last, log_g=log_g, dlog_g=dlog_g, **tables)
    return dlog_g


def _gate_gradient_by_chunk(plan: Plan, final: bool, parts: int, block: int) -> Launcher:
    chunks = plan.layout.blocks(plan.chunk)
    heads = heads_together(plan.G, chunks, plan.processors)
    constants = {"R": plan.R, "P": plan.p, "CHUNK": plan.chunk, "BLOCK": block // heads, "FINAL": final}
    constants |= {"PARTS": parts, "COUNT": next_power_of_2(parts), "HEADS": heads, "num_warps": 2 if heads > 1 else 4}
    numbers = plan.sequences() | {"G": plan.G}
    grid = (chunks, plan.G // heads)
    return Launcher(gate.gate_gradient_by_chunk, grid, numbers | constants | {"PACKED": plan.layout.packed})


def _gate_constants(plan: Plan, block: int) -> dict[str, Any]:
    return {"R": plan.R, "P": plan.p, "BLOCK": block, "PACKED": plan.layout.packed} | plan.early()


def _gate_totals(plan: Plan, block: int) -> Launcher:
    grid = (plan.layout.blocks(block), plan.G)
    return Launcher(gate.gate_totals, grid, plan.sequences() | _gate_constants(plan, block))


def _gate_gradient(plan: Plan, final: bool, block: int) -> Launcher:
    constants = _gate_constants(plan, block) | {"FINAL": final}
    grid = (plan.layout.blocks(block), plan.G)
    return Launcher(gate.gate_gradient, grid, plan.sequences() | {"G": plan.G} | constants)


# The launch of each stage, by variant. A quadratic form has no states.
OUTPUT = {
    "plain": _output,
    "hopper": _output_on_hopper,
    "hopper_quadratic": _output_on_hopper,
    "levels": _output_on_hopper,
    "levels_quadratic": _output_on_hopper,
}
STATES = {"plain": _states, "hopper": _states_on_hopper, "levels": _states_by_levels}
QUERY_GRADIENT = {
    "plain": _query_gradient,
    "hopper": _query_gradient_on_hopper,
    "hopper_quadratic": _quadratic_query_gradient,
    "levels": _query_gradient_by_levels,
    "levels_quadratic": _query_gradient,
}
KEY_GRADIENT = {
    "plain": _key_gradient,
    "hopper": _key_gradient_on_hopper,
    "hopper_quadratic": _quadratic_key_gradient,
    "levels": _key_gradient_by_levels,
    "levels_quadratic": _key_gradient,
}
