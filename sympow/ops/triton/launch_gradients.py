"""The launches of the gradients of one call: a function for each stage, as in `launch.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.ops.runtime.launcher import Launcher
from sympow.ops.triton import config, gate, gradients
from sympow.ops.triton.hopper import gradients_quadratic, key_gradient_levels, query_gradient_levels
from sympow.ops.triton.hopper import key_gradient as hopper_key_gradient
from sympow.ops.triton.hopper import query_gradient as hopper_query_gradient
from sympow.ops.triton.levels import TILE
from sympow.ops.triton.plan import Call, Plan

GATE_BLOCK, SHORT_GATE_BLOCK = 1024, 256  # tokens of a block of the gate's gradient, along whole rows and within chunks
STATE_BLOCK, STATE_PARTS = 2048, 8  # of `through_states`: elements read together, and programs of one state


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
        starts=call.cu_seqlens, blocks=call.table(config.WEIGH_BLOCK),
    )  # fmt: skip
    return RowFactors(factor, scales, near, delta)


def _row_factors(plan: Plan, normalize: bool, early: bool) -> Launcher:
    numbers = plan.sequences() | {"H": plan.H, "out_scale": plan.out_scale}
    constants = {"V": plan.V, "COLUMNS": plan.columns, "R": plan.R, "BLOCK": config.WEIGH_BLOCK, "GATED": plan.gated}
    constants |= {"NORMALIZE": normalize, "TILED": plan.variant == "hopper_quadratic"}
    constants |= {"PACKED": plan.layout.packed} | plan.early(plan.gated)
    if not early:  # the same code, launched without overlap
        constants.pop("launch_pdl", None)
    return Launcher(gradients.row_factors, (plan.layout.blocks(config.WEIGH_BLOCK), plan.H), numbers | constants)


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
    constants = {"R": plan.R, "P": plan.p, "CHUNK": plan.chunk, "BLOCK": block, "FINAL": final}
    constants |= {"PARTS": parts, "COUNT": config.next_power_of_2(parts)}
    numbers = plan.sequences() | {"G": plan.G}
    grid = (plan.layout.blocks(plan.chunk), plan.G)
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


# The launch of each gradient, by variant.
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
