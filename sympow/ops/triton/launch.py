"""The launches of one call: a function for each stage. States and outputs are here, gradients in `launch_gradients.py`.
Only these two files decide which kernel a stage takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.ops.triton import config
from sympow.ops.triton import output as plain_output
from sympow.ops.triton import states as plain_states
from sympow.ops.triton.call import Call
from sympow.ops.triton.hopper import output as hopper_output
from sympow.ops.triton.hopper import powers
from sympow.ops.triton.hopper import states as hopper_states
from sympow.ops.triton.launcher import Launcher
from sympow.ops.triton.plan import Plan


def output(
    call: Call, s: Tensor | None, z: Tensor | None, init: bool, normalize: bool, eps: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, H, V], float32 if `wide`, and the normalizer [H, B T], empty unless `normalize`, from the
    states before each chunk. `init` tells that the first of them is not zero."""
    plan, q, k, v = call.plan, call.q, call.k, call.v
    out = plan.new(*q.shape[:3], plan.V, dtype=torch.float32 if wide else plan.dtype)
    norm = plan.new_rows(plan.H if normalize else 0)
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "out": out, "norm": norm}
    tensors |= {"sums": call.gate.sums, "reach": call.gate.begins}
    if plan.hopper or plan.leveled:
        launch = plan.launcher(_output_on_hopper, init, normalize, eps, wide)
        s, z = out if s is None else s, out if z is None else z
        launch(**tensors, s=s, z=z, **call.sequences(plan.hopper_launches.output.block))
        return out, norm
    launch = plan.launcher(_output, init, normalize, eps, wide)
    launch(**tensors, s=s, z=z, **call.sequences(plan.config.output.block))
    return out, norm


def _output(plan: Plan, init: bool, normalize: bool, eps: float, wide: bool) -> Launcher:
    size, (prefixes, weights, *_) = plan.config.output, plan.tables
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.counts()
    numbers |= {"score_scale": plan.score_scale, "out_scale": plan.out_scale, "eps": eps}
    constants = plan.dims() | {"BLOCK": size.block, "KEYS": size.step, "PACKED": plan.layout.packed}
    constants |= {"NORMALIZE": normalize, "STATES": plan.chunk > 0, "INIT": init}
    tables = {"prefixes": prefixes, "weights": weights}
    grid = (plan.layout.blocks(size.block), plan.H)
    return Launcher(plain_output.output_pass, grid, numbers | constants | tables | size.options)


def _output_on_hopper(plan: Plan, init: bool, normalize: bool, eps: float, wide: bool) -> Launcher:
    size = plan.hopper_launches.output
    levels: tuple = plan.levels.shape if plan.chunk and plan.leveled else ()
    prefixes, weights = plan.tables[1:3] if levels else (None, None)
    numbers = plan.strides | plan.sequences() | plan.heads() | plan.spread(size, plan.H)
    numbers |= {"out_scale": plan.out_scale, "eps": eps}
    constants = plan.hopper_dims(size) | {"P": plan.p, "LEVELS": levels}
    constants |= {"SKIP": plan.skip, "KEYS": size.step, "NORMALIZE": normalize}
    constants |= {"STATES": plan.chunk > 0, "INIT": init} | plan.early(after=plan.gated)
    tables = {"prefixes": prefixes, "weights": weights}
    grid = (plan.layout.blocks(size.block), plan.H)
    return Launcher(hopper_output.output_pass, grid, numbers | constants | tables)


def new_ends(call: Call, z: bool) -> tuple[Tensor, Tensor]:
    """Allocates the last S [N, G, rows, V] and Z [N, G, K, K], float32."""
    s_end, z_end = (
        torch.empty(shape, device=call.plan.device, dtype=torch.float32) for shape in call.plan.end_shapes(z)
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
    shape = (call.plan.layout.blocks(call.plan.chunk), call.plan.G, _state_programs(call.plan, z))
    return torch.empty(shape, device=call.plan.device, dtype=torch.float64)


def states(
    call: Call, s_init: Tensor | None, z_init: Tensor | None, ends: tuple[Tensor, Tensor] | None, z: bool,
    gradient: tuple[Tensor, Tensor, Tensor] | None = None, room: tuple[Tensor, Tensor] | None = None,
    forward: ForwardStates | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns S [chunks, G, rows, V] and Z [chunks, G, K, K] at the boundaries of chunks, in `room` if that is given.
    The last ones are written to `ends`.

    If `gradient` is given, (dout, factor, delta), the pass runs in reverse and computes the gradients of the states. S
    and Z of `forward` may be `room`; the gradients then replace them.
    """
    plan = call.plan
    x, y = (call.k, call.v) if gradient is None else (call.q, gradient[0])
    norm, delta = (None, None) if gradient is None else gradient[1:]
    block, reverse = _weigh_block(plan), gradient is not None
    xt = torch.empty(_weighed_shape(plan, reverse), device=plan.device, dtype=plan.dtype)
    weigh = plan.launcher(_weigh, reverse)
    blocks = call.table(block)
    weigh(x=x, sums=call.gate.sums, norm=norm, delta=delta, out=xt, starts=call.cu_seqlens, blocks=blocks)

    s, zs = new_states(call, z) if room is None else room
    init, final = s_init is not None, ends is not None
    s_init, z_init = (s, zs) if s_init is None else (s_init, zs if z_init is None else z_init)
    s_final, z_final = (s, zs) if ends is None else ends
    tensors: dict[str, Tensor | None] = {"xt": xt, "y": y, "sums": call.gate.sums}
    tensors |= {"s_out": s, "s_init": s_init, "s_final": s_final}
    tensors |= {"starts": call.cu_seqlens, "chunk_starts": call.chunk_starts()}
    if plan.leveled:  # whose rows have the transposed keys, and which have no Z
        plan.launcher(_states_by_levels, reverse, init, final)(**tensors)
        return s, zs
    tensors |= {"x": x, "z_out": zs, "z_init": z_init, "z_final": z_final}
    tensors |= dict(zip(("s_forward", "z_forward", "products"), forward or (None,) * 3, strict=True))
    make = _states_on_hopper if plan.hopper else _states
    plan.launcher(make, reverse, init, final, z)(**tensors)
    return s, zs


def _weigh_block(plan: Plan) -> int:
    return min(config.WEIGH_BLOCK, plan.chunk)


def _weighed_shape(plan: Plan, reverse: bool) -> tuple[int, int]:
    """Returns the shape of the transposed keys (queries in reverse). The state pass may read past the last row."""
    block, heads = _weigh_block(plan), plan.H if reverse else plan.G
    stride = (config.ceil_div(plan.layout.tokens, block) + plan.layout.sequences) * block
    return heads * (2 * plan.K + 1 if plan.p > 2 else plan.K + 1) + 16, stride


def _sources(plan: Plan, reverse: bool) -> dict[str, Any]:
    """Returns the strides by token and head of k and v, or of q and the output's gradient, which is contiguous."""
    own = plan.strides
    if reverse:
        return {"x_st": own["q_st"], "x_sh": own["q_sh"], "y_st": plan.H * plan.V, "y_sh": plan.V}
    return {"x_st": own["k_st"], "x_sh": own["k_sh"], "y_st": own["v_st"], "y_sh": own["v_sh"]}


def _weigh(plan: Plan, reverse: bool) -> Launcher:
    block, heads = _weigh_block(plan), plan.H if reverse else plan.G
    sources = _sources(plan, reverse)
    numbers = plan.sequences() | {"x_st": sources["x_st"], "x_sh": sources["x_sh"], "R": heads // plan.G}
    numbers |= {"stride": _weighed_shape(plan, reverse)[1], "weight": plan.out_scale}
    constants = {"K": plan.K, "P": plan.p, "BLOCK": block, "CHUNK": plan.chunk, "GATED": plan.gated}
    constants |= {"REVERSE": reverse, "PACKED": plan.layout.packed}
    return Launcher(plain_states.weigh, (plan.layout.blocks(block), heads), numbers | constants)


def _state_arguments(plan: Plan, reverse: bool, init: bool, final: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the numbers and constants that all state passes take."""
    numbers = plan.sequences() | {"G": plan.G, "stride": _weighed_shape(plan, reverse)[1]}
    constants = {"R": plan.R if reverse else 1, "REVERSE": reverse, "PACKED": plan.layout.packed, "INIT": init}
    return numbers, constants | {"FINAL": final, "ALIGN": _weigh_block(plan), "CHUNK": plan.chunk, "GATED": plan.gated}


def _state_tiles(plan: Plan) -> int:
    """Returns the number of tiles of rows of a program of the state pass."""
    if not plan.hopper:
        return plan.config.state.block
    size = plan.hopper_launches.state
    programs = hopper_states.programs(plan.K, plan.parts, size.block, size.tile, size.warps)
    # Half the tiles if there would be fewer than two programs for each SM: two programs hide each other's latency.
    few = programs * plan.G * plan.layout.sequences < 2 * config.processors(plan.device)
    return 2 if few else size.block


def _state_programs(plan: Plan, z: bool) -> int:
    """Returns the number of programs of the state pass for one key/value head of one sequence."""
    tiles = _state_tiles(plan)
    if plan.hopper:
        size = plan.hopper_launches.state
        return hopper_states.programs(plan.K, plan.parts, tiles, size.tile, size.warps)
    counts, narrow, least = plan.counts(), plan.K - plan.half, 64  # rows of a product
    programs = int(z) + config.ceil_div(counts["lower"], tiles * max(1, least // plan.K))
    return programs + (config.ceil_div(counts["upper"], tiles * max(1, least // narrow)) if counts["upper"] else 0)


def _states(plan: Plan, reverse: bool, init: bool, final: bool, z: bool) -> Launcher:
    size = plan.config.state
    numbers, constants = _state_arguments(plan, reverse, init, final)
    numbers |= _sources(plan, reverse) | plan.counts()
    constants = plan.dims() | constants | {"TILES": _state_tiles(plan), "STEP": size.step, "Z": z}
    arguments = numbers | constants | {"prefixes": plan.tables[0]} | size.options
    grid = (_state_programs(plan, z), plan.G, plan.layout.sequences)
    return Launcher(plain_states.state_pass, grid, arguments)


def _states_on_hopper(plan: Plan, reverse: bool, init: bool, final: bool, z: bool) -> Launcher:
    size = plan.hopper_launches.state
    numbers, constants = _state_arguments(plan, reverse, init, final)
    constants |= {"K": plan.K, "V": plan.V, "PARTS": plan.parts, "TILES": _state_tiles(plan)}
    constants |= {"WIDTH": size.tile, "STEP": size.step, "STAGES": size.stages, "num_warps": size.warps}
    if constants["TILES"] == 2 and plan.K <= 64:
        constants["maxnreg"] = config.THREE_PROGRAMS
    grid = (_state_programs(plan, z), plan.G, plan.layout.sequences)
    return Launcher(hopper_states.state_pass, grid, numbers | _sources(plan, reverse) | constants)


def _states_by_levels(plan: Plan, reverse: bool, init: bool, final: bool) -> Launcher:
    size, levels = plan.hopper_launches.state, plan.levels.shape
    tiles = min(size.block, 128 // plan.V)
    numbers, constants = _state_arguments(plan, reverse, init, final)
    sources = _sources(plan, reverse)
    numbers |= {"y_st": sources["y_st"], "y_sh": sources["y_sh"]}
    constants |= {"K": plan.K, "V": plan.V, "P": plan.p, "LEVELS": levels, "TILES": tiles}
    constants |= {"STEP": size.step, "STAGES": size.stages, "num_warps": size.warps}
    grid = (powers.programs(levels, tiles, size.warps), plan.G, plan.layout.sequences)
    return Launcher(powers.state_pass, grid, numbers | constants | {"prefixes": plan.tables[0]})
