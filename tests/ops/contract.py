"""What every implementation of power attention is held to: inputs, the oracle, and the tolerances, in one place.

The oracle is the quadratic form of `sympow.ops.reference` in float64. Tolerances:

- float64: 1e-10 of the norm. A sum of n terms rounds by about n**0.5 * 1.1e-16 of its norm, and the normalizer's
  reciprocal amplifies it by the condition of the division; the drawn shapes stay 1e4 below this.
- lower precision, by comparison: an implementation may err by at most twice what the same mathematics errs in plain
  torch at that precision (matrix products of inputs rounded to it, the rest in float32), plus what any implementation
  rounds: one rounding of what is stored; the rounding of a float32 log decay between two tokens, of a size at which
  the decay still counts, whatever the gates before both are; of a float32 sum over up to T tokens, growing as the
  square root of T; of a float32 sum over the D features of a state (`feature_sums`), growing as the square root of D,
  in outputs, in the gradients of keys and values through the returned states, and, by the normalizer and the output,
  in all gradients of a row that reads a state; for states and their gradients, whose terms are products of p entries
  and a decay, each of which a kernel may round where the peer rounds the whole (or nothing, as in z), p roundings to
  nearest, of the result or, where terms of different tokens cancel and their roundings do not, of these terms
  (`terms_into_states`); for other results, if p > 2, the p - 2 such roundings that phi(q) and phi(k) have more than for
  p = 2; for the gate's gradient, a sum over up to T tokens of q.dq - k.dk, the rounding of those dot products, |q||dq|
  and |k||dk|, each gradient a float32 sum over up to T, growing as the square root of their number, and what dq and dk
  may err by, which at one token is all there is.
  With a normalizer and p > 2, a query that is nearly orthogonal to all keys divides a small sum of large terms by
  another one: their roundings, p each, grow by the condition of the sums, and so does the gradient through that row.
  Its output and the gradient that goes into it are taken smaller by the square of the condition, so that it does not
  drown the others; what is left are p roundings. With p = 2 the same is done where one such row may be most of a
  gradient, its error here and in the peer two draws of which either may be the smaller by far: with a state from
  before, which both read at the lower precision, and at one token, or behind a reset, where the gradients of q and k
  are what is left of the parts through the numerator and the normalizer, which cancel: two roundings of these parts,
  of such parts of the gate's gradient, and of the part of dz, in which products of y and dy cancel.
  What gates have decayed to less than 1e-6 of the largest result is judged by that. The peer is the quadratic form, or
  the chunked one at the same chunk size where p is so high that forming phi rounds more often than forming scores.
  Errors are norms of differences from float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sympow.ops import PowerState, power_attention, reference
from sympow.ops.feature_map import spow

FLOAT64_TOLERANCE = 1e-10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS32 = torch.finfo(torch.float32).eps
_RESET = -5.0  # a log gate behind which a row has few terms
_TOKENS = 32  # whose features are held at a time
_FEW = 16  # tokens, whose roundings may cancel by chance in a single call of the peer
_LOG_DECAY = 16.0  # the size of a log decay, beyond which the decay is below 1.2e-7


@dataclass(frozen=True)
class Sizes:
    """What all calls of the op and of the delta rule have. `ends` are the ends of packed documents; then B is 1."""

    B: int = 1
    T: int = 1
    H: int = 1
    G: int = 1
    K: int = 2
    V: int = 2
    p: int = 2
    gate: bool = True
    state: bool = False
    return_state: bool = True
    ends: tuple[int, ...] | None = None

    @property
    def states(self) -> int:
        """How many sequences have a state."""
        return self.B if self.ends is None else len(self.ends)

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.ends is None else torch.tensor((0, *self.ends), dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class Case(Sizes):
    """One call of power_attention."""

    normalize: bool | None = None
    eps: float = 1e-6

    @property
    def divides(self) -> bool:
        return self.p % 2 == 0 if self.normalize is None else self.normalize


# Odd on purpose: one token, T on no chunk boundary, one head, groups, V != K, documents of length 0 and 1.
CASES = {
    "one token": Case(),
    "one token, state": Case(T=1, H=4, G=2, K=4, V=3, state=True),
    "no batch": Case(B=0, T=3),
    "one head": Case(B=2, T=37, K=5, V=7),
    "no gate": Case(B=2, T=37, H=3, G=3, K=4, V=4, gate=False),
    "groups": Case(B=2, T=65, H=6, G=2, K=4, V=3, state=True),
    "multi-query": Case(B=1, T=130, H=5, G=1, K=3, V=1),
    "long": Case(B=1, T=301, H=2, G=2, K=8, V=8, state=True),
    "no state out": Case(B=1, T=150, H=2, G=1, K=4, V=5, return_state=False),
    "even p, no normalization": Case(B=2, T=33, H=2, G=2, K=4, V=4, normalize=False, state=True),
    "large eps": Case(B=2, T=33, H=4, G=2, K=4, V=4, eps=0.5, state=True),
    "p 1": Case(B=2, T=70, H=2, G=1, K=5, V=4, p=1, state=True),
    "p 1, no gate": Case(B=2, T=70, H=2, G=1, K=5, V=4, p=1, gate=False),
    "p 3": Case(B=1, T=45, H=2, G=1, K=5, V=4, p=3, state=True),
    "p 4": Case(B=1, T=45, H=2, G=1, K=5, V=4, p=4, state=True),
    "p 6": Case(B=1, T=9, H=1, G=1, K=4, V=2, p=6),
    "packed": Case(T=70, H=2, G=1, K=4, V=3, ends=(1, 1, 20, 70)),
    "packed, states": Case(T=41, H=2, G=2, K=3, V=4, p=3, state=True, ends=(0, 40, 41, 41)),
}


def normal(gen: torch.Generator) -> Callable[..., Tensor]:
    """A function of a shape that draws from N(0, 1) in float64."""
    return partial(torch.randn, generator=gen, dtype=torch.float64)


def leaves(inputs: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Leaves that require gradients: queries, keys and values of the dtype, and the rest in float32 at least."""
    compute = torch.promote_types(dtype, torch.float32)
    return {
        name: None if x is None else x.to(DEVICE, dtype if name in "qkv" else compute).requires_grad_()
        for name, x in inputs.items()
    }


def make_inputs(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
    """Leaves that require gradients: q, k, v, log_g, and s, z of a state that some tokens could have left."""
    draw = normal(torch.Generator().manual_seed(seed))
    inputs: dict[str, Tensor | None] = {
        "q": draw(case.B, case.T, case.H, case.K),
        "k": draw(case.B, case.T, case.G, case.K),
        "v": draw(case.B, case.T, case.G, case.V),
        # From gates that forget within a token to ones that keep thousands.
        "log_g": logsigmoid(4 * draw(case.B, case.T, case.G) + 2) if case.gate else None,
        "s": None,
        "z": None,
    }
    if case.state:
        past = [draw(case.states, 3, case.G, d) for d in (case.K, case.K, case.V)]
        _, state = reference.quadratic(*past, None, p=case.p, scale=1.0, normalize=False, eps=1.0)
        inputs |= {"s": state.s, "z": state.z}
    return leaves(inputs, dtype)


def forward(
    case: Case, inputs: dict[str, Tensor | None], impl: str, chunk_size: int | None = None
) -> dict[str, Tensor]:
    """Outputs and states."""
    state = None if inputs["s"] is None else PowerState(inputs["s"], inputs["z"], case.p, case.K)
    out, after = power_attention(
        *(inputs[name] for name in ("q", "k", "v", "log_g")),
        p=case.p,
        normalize=case.divides,
        eps=case.eps,
        chunk_size=chunk_size,
        initial_state=state,
        return_state=case.return_state,
        cu_seqlens=case.cu_seqlens,
        impl=impl,
    )
    return {"out": out} | ({"s": after.s, "z": after.z} if after else {})


def run(case: Case, inputs: dict[str, Tensor | None], impl: str, chunk_size: int | None = None) -> dict[str, Tensor]:
    """Outputs, states and, for random output gradients, the gradient of every input."""
    results = forward(case, inputs, impl, chunk_size)
    return with_gradients(results, inputs, row_weights_of(case, inputs))


def by_document(case: Case, inputs: dict[str, Tensor | None], form: Callable) -> dict[str, Tensor]:
    """Outputs and states of a form(q, k, v, log_g, state) -> (out, state), one document at a time."""
    ends = (0, *(case.ends or (case.T,)))
    outs, states = [], []
    for n, span in enumerate(slice(a, b) for a, b in pairwise(ends)):
        state = PowerState.zeros(1, case.G, case.K, case.V, case.p, dtype=inputs["k"].dtype, device=inputs["k"].device)
        if case.state:
            rows = slice(None) if case.ends is None else slice(n, n + 1)
            state = PowerState(inputs["s"][rows], inputs["z"][rows], case.p, case.K)
        if span.start < span.stop:
            tokens = [None if inputs[x] is None else inputs[x][:, span] for x in ("q", "k", "v", "log_g")]
            out, state = form(*tokens, state if case.state else None)
            outs.append(out)
        states.append(state)
    results = {"out": torch.cat(outs, 1)}
    if case.return_state:
        results |= {"s": torch.cat([x.s for x in states]), "z": torch.cat([x.z for x in states])}
    return results


def with_gradients(
    results: dict[str, Tensor], inputs: dict[str, Tensor | None], row_weights: Tensor | None = None
) -> dict[str, Tensor]:
    """Adds the gradient of every input for fixed random gradients of the results, small enough for float16's range;
    those of out are multiplied by `row_weights`."""
    weights = gradients_of(results, row_weights)
    loss = sum((x * weights[name].to(x)).sum() for name, x in results.items())
    leaves = {name: x for name, x in inputs.items() if x is not None}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {name: x.detach() for name, x in results.items()}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        results["d" + name] = torch.zeros_like(x) if grad is None else grad
    return results


def gradients_of(results: dict[str, Tensor], row_weights: Tensor | None) -> dict[str, Tensor]:
    """The gradients of outputs and states that `with_gradients` takes, float64."""
    gen = torch.Generator().manual_seed(1)
    names = [name for name in ("out", "s", "z") if name in results]
    weights = {name: torch.randn(results[name].shape, generator=gen, dtype=torch.float64) / 16 for name in names}
    if row_weights is not None:
        weights["out"] = weights["out"].to(row_weights) * row_weights
    return weights


def feature_terms(case: Case, inputs: dict[str, Tensor | None]) -> Tensor:
    """What outputs that are read from a state may round, in units of eps, [B, T, H, V] float64: their terms by phi, as
    large as if all queries and keys were parallel. It exceeds the output where (q . k)**p is small beside them."""

    def first(x: Tensor, dim: int) -> Tensor:
        """The norm over `dim` in its first place, and zeros in the others."""
        return torch.zeros_like(x).index_copy(dim, torch.tensor([0], device=x.device), x.norm(dim=dim, keepdim=True))

    high = {name: None if x is None else x.detach().double() for name, x in inputs.items()}
    large = {name: first(high[name], -1) for name in "qk"} | {"v": high["v"].abs(), "log_g": high["log_g"]}
    if case.state:
        large |= {"s": first(high["s"], 2).abs(), "z": first(high["z"], 2)}
    case = replace(case, return_state=False)
    form = partial(reference.quadratic, p=case.p, scale=case.K**-0.5, normalize=False, eps=case.eps)
    terms = by_document(case, large, form)["out"]
    if not case.divides:
        return terms
    z = high["z"][..., None] if case.state else None
    ones = {"v": torch.ones_like(high["v"][..., :1])}
    weights = by_document(case, large | ones | {"s": None if z is None else first(z, 2)}, form)["out"]
    total = by_document(case, high | ones | {"s": z}, form)["out"] + case.eps
    out = by_document(case, high, partial(form, normalize=True))["out"]
    return (terms + out.abs() * weights) / total


def feature_sums(phi: Tensor, state: Tensor) -> Tensor:
    """What the sums over D features of phi [B, T, G, D] times a state [B, G, D, V] may round in float32, in units of
    eps: [B, T, G, V].

    Terms that are added one after the other are rounded D times, each time by up to eps / 2 of the sum so far. These
    roundings are independent, and a sum so far is about as large as the square root of the sum of all squares, or as
    the result. Random errors are a sixth of this on average, for p from 1 to 4 and K from 16 to 128.
    """
    squares = torch.einsum("btgd,bgdv->btgv", phi.square(), state.square())
    return (phi.shape[-1] * (squares + torch.einsum("btgd,bgdv->btgv", phi, state).square())).sqrt()


def terms_through_states(case: Case, high: dict[str, Tensor | None], oracle: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the gradients of keys and values that come through the returned states may round, in units of eps: dk
    [B, T, G] and dv [B, T, G, V], float64. Both are sums over all features. That of dk is here as large as if the
    gradient of phi(k) were parallel to phi(k)."""
    weights = gradients_of(oracle, None)
    k, v = high["k"].detach(), high["v"].detach()
    log_g = torch.zeros_like(k[..., 0]) if high["log_g"] is None else high["log_g"].detach().clamp(min=-800)
    ds, dz = (weights[name].to(k) for name in ("s", "z"))
    spans = [slice(a, b) for a, b in pairwise((0, *(case.ends or (case.T,))))]
    dks, dvs = [], []
    for n, span in enumerate(spans):
        rows = slice(None) if case.ends is None else slice(n, n + 1)
        gates = log_g[:, span]
        size = k[:, span].norm(dim=-1)
        last = (gates.flip(1).cumsum(1).flip(1) - gates).exp()  # the decay from each token to the end
        dphi = torch.einsum("bgdv,btgv->btgd", ds[rows], v[:, span]) + dz[rows, None]
        dks.append(case.p * last * size ** (case.p - 1) * dphi.norm(dim=-1))
        tokens = k[:, span].split(_TOKENS, 1)
        dvs.append(last[..., None] * torch.cat([feature_sums(spow(x, case.p), ds[rows]) for x in tokens], 1))
    return {"dk": torch.cat(dks, 1), "dv": torch.cat(dvs, 1)}


@torch.no_grad()
def terms_into_states(
    case: Case, high: dict[str, Tensor | None], oracle: dict[str, Tensor], row_weights: Tensor | None
) -> dict[str, float]:
    """The norms, over entries and tokens, of the terms that are summed to s, z, ds and dz, of those that the call has.

    That of phi(x) is |x|**p. Each term rounds by itself, so the errors of a sum are about as large as the square root
    of the sum of their squares, however much the terms cancel: with K = 1 and an odd p, z is a sum of numbers of both
    signs.
    """
    q, k, v, log_g = (high[name] for name in ("q", "k", "v", "log_g"))
    log_g = torch.zeros_like(k[..., 0]) if log_g is None else log_g.clamp(min=-800)
    sizes: dict[str, float] = {}
    spans = [slice(a, b) for a, b in pairwise((0, *(case.ends or (case.T,))))]
    if case.return_state:
        last = torch.cat([log_g[:, x].flip(1).cumsum(1).flip(1) - log_g[:, x] for x in spans], 1).exp()
        weights = last * k.norm(dim=-1) ** case.p
        sizes |= {"s": (weights * v.norm(dim=-1)).norm().item(), "z": weights.norm().item()}
    if case.state:
        kept = torch.cat([log_g[:, x].cumsum(1) for x in spans], 1).exp().repeat_interleave(case.H // case.G, 2)
        weights = kept * (case.K**-0.5 * q.norm(dim=-1)) ** case.p
        dout = gradients_of(oracle, row_weights)["out"].to(q)
        if case.divides:
            dout = dout / (_normalizers(case, high) + case.eps)
            sizes["dz"] = (weights * (dout * oracle["out"]).sum(-1)).norm().item()
        sizes["ds"] = (weights * dout.norm(dim=-1)).norm().item()
    return sizes


@torch.no_grad()
def terms_of_states(case: Case, high: dict[str, Tensor | None], chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """What a numerator [B, T, H, V] and a normalizer [B, T, H, 1] may round, in units of eps, in their sums over the
    features of the state before each chunk, float64."""

    def form(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None) -> tuple:
        sizes = []
        log_g = torch.zeros_like(k[..., 0]) if log_g is None else log_g
        size = chunk_size or q.shape[1]
        for tokens in zip(*(x.split(size, 1) for x in (q, k, v, log_g)), strict=True):
            kept = tokens[3].clamp(min=-800).cumsum(1).exp()[..., None]
            read = torch.zeros_like(tokens[0][..., :1]).expand(-1, -1, -1, case.V + 1)
            if state is not None:
                s = torch.cat([state.s, state.z[..., None]], -1)
                queries = (tokens[0] * case.K**-0.5).unflatten(2, (case.G, -1))
                heads = [
                    kept * torch.cat([feature_sums(spow(x, case.p), s) for x in head.split(_TOKENS, 1)], 1)
                    for head in queries.unbind(3)
                ]
                read = torch.stack(heads, 3).flatten(2, 3)
            sizes.append(read)
            _, state = reference.quadratic(*tokens, state, p=case.p, scale=1.0, normalize=False, eps=1.0)
        return torch.cat(sizes, 1), state

    sizes = by_document(replace(case, return_state=False), high, form)["out"]
    return sizes[..., :-1], sizes[..., -1:]


def assert_equal_float64(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rounding: dict[str, Tensor] | None = None
) -> None:
    """`rounding`: what results may err by, beside the tolerance, in units of eps."""
    assert actual.keys() == expected.keys()
    # A gradient that cancels to nothing, as that of a gate before which there is nothing, is judged by what cancelled.
    floor = max((x.norm().item() for x in expected.values()), default=0.0) * 1e-3
    for name, want in expected.items():
        assert actual[name].shape == want.shape, name
        error = (actual[name] - want).norm().item()
        allowed = FLOAT64_TOLERANCE * max(want.norm().item(), floor)
        allowed += torch.finfo(torch.float64).eps * (rounding or {}).get(name, want.new_zeros(1)).norm().item()
        assert error <= allowed, f"{name}: {error:.2e} of {want.norm():.2e}"


def assert_within_budget(
    actual: dict[str, Tensor],
    case: Case,
    inputs: dict[str, Tensor | None],
    chunk_size: int | None = None,
    oracle: dict[str, Tensor] | None = None,
    reading: dict[str, Tensor] | None = None,
) -> None:
    """`chunk_size`: the peer is the chunked form, as the implementation was; else the quadratic one. `oracle`: results
    in float64, those of the reference if None. `reading`: what results may round, in units of eps of float32, beside
    what the peer does. With few tokens the largest error of four similar calls is the peer's."""
    dtype = inputs["q"].dtype
    high = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    oracle = run(case, high, "reference") if oracle is None else oracle
    options = {"p": case.p, "scale": case.K**-0.5, "normalize": case.divides, "eps": case.eps}
    row_weights = row_weights_of(case, high)
    form = partial(reference.quadratic, **options)
    if chunk_size:
        form = partial(reference.chunked, chunk_size=chunk_size, **options)

    def results_in(dtype: torch.dtype, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
        low = {name: None if x is None else x.detach().float().requires_grad_() for name, x in inputs.items()}
        with torch.autocast(DEVICE, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            return with_gradients(by_document(case, low, partial(_with_two_tokens, form)), low, row_weights)

    peer = results_in(dtype, inputs)
    if dtype == torch.float16 and not all(x.isfinite().all() for x in peer.values()):
        # At a row with a small normalizer its gradients exceed the range of float16. bfloat16 has that of float32.
        coarser = torch.finfo(torch.bfloat16).eps / torch.finfo(dtype).eps
        peer = {
            n: oracle[n] + (x.double() - oracle[n]) / coarser for n, x in results_in(torch.bfloat16, inputs).items()
        }
    peers = [(peer, oracle)]
    for factor in (1.1, 1.2, 1.3) if case.T <= _FEW else ():  # calls like this one, whose roundings are other ones
        other = inputs | {"q": (inputs["q"].detach() * factor).to(dtype)}
        exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in other.items()}
        found = results_in(dtype, other)
        if all(x.isfinite().all() for x in found.values()):
            peers.append((found, run(case, exact, "reference")))
    floor = max((x.norm().item() for x in oracle.values()), default=0.0) * 1e-6
    cancelled = {} if row_weights is None else _cancelled(case, high, oracle, row_weights)
    features = _over_features(case, high, oracle, row_weights, chunk_size)
    terms = terms_into_states(case, high, oracle, row_weights)
    wrong = []  # all of them, as which are wrong tells what is
    for name, got in actual.items():
        want = oracle[name]
        norm = max(want.norm().item(), floor)
        assert got.shape == want.shape, name
        rounding = (torch.finfo(got.dtype).eps + (_LOG_DECAY + case.T**0.5) * EPS32) * norm
        eps = torch.finfo(dtype).eps
        # Two roundings, each by half of the distance between subnormal numbers. Only those of float16 are large.
        rounding += eps * torch.finfo(dtype).smallest_normal * got.numel() ** 0.5
        if reading is not None and name in reading:
            rounding += EPS32 * reading[name].norm().item()
        if name in ("s", "z", "ds", "dz"):
            rounding += case.p / 2 * eps * max(norm, terms.get(name, 0.0))
        else:
            rounding += max(0, case.p - 2) * eps * norm
        rounding += EPS32 * features.get(name, 0.0)
        if name == "dlog_g":
            size, errors = (
                sum((high[x].norm(dim=-1) * grad["d" + x].norm(dim=-1)).norm().item() / case.p for x in "qk")
                for grad in (oracle, {n: peer[n].double() - oracle[n] for n in ("dq", "dk")})
            )
            rounding += (eps + EPS32 * case.T**0.5) * case.T**0.5 * size + 2 * errors
        rows = 1.0
        if row_weights is not None:
            rows = row_weights if name == "out" else 1.0
            rounding += 2 * eps * cancelled.get(name, 0.0)
            if case.p > 2:
                rounding += case.p / 2 * eps * norm
        budget = 2 * max(((x[name].double() - y[name]) * rows).norm().item() for x, y in peers) + rounding
        error = ((got.double() - want) * rows).norm().item()
        if not (torch.isfinite(got).all() and error <= budget):
            wrong.append(f"{name}: {error:.2e} of {norm:.2e}, allowed {budget:.2e}")
    assert not wrong, "; ".join(wrong)


def _over_features(
    case: Case,
    high: dict[str, Tensor | None],
    oracle: dict[str, Tensor],
    row_weights: Tensor | None,
    chunk_size: int | None,
) -> dict[str, float]:
    """The norms, by result, of what sums over the features of states may round, in units of eps of float32."""
    sizes: dict[str, float] = {}
    if "s" in oracle:
        through = terms_through_states(case, high, oracle)
        sizes = {name: x.norm().item() for name, x in through.items()}
        sizes["dlog_g"] = 2 * (high["k"].norm(dim=-1) * through["dk"]).norm().item() / case.p
    if not case.state and not (chunk_size and chunk_size < case.T):
        return sizes
    numerators, normalizers = terms_of_states(case, high, chunk_size)
    rows = 1.0 if row_weights is None else row_weights
    if not case.divides:
        return sizes | {"out": (numerators * rows).norm().item()}
    total = _normalizers(case, high).detach() + case.eps
    relative = normalizers / total
    terms = numerators / total + oracle["out"].abs() * relative
    sizes["out"] = (terms * rows).norm().item()
    # The gradients of a row's numerator and normalizer are divided by the rounded normalizer, and the latter has y dy.
    dout = gradients_of(oracle, row_weights)["out"].to(total)
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in high.items()}
    form = partial(reference.quadratic, p=case.p, scale=case.K**-0.5, normalize=False, eps=case.eps)
    values = by_document(replace(case, return_state=False), leaves, form)["out"]
    size = dout.norm(dim=-1, keepdim=True) * terms.norm(dim=-1, keepdim=True)
    for loss in (
        (relative / total * dout * values).sum(),
        (size * (_normalizers(case, leaves) + case.eps).log()).sum(),
    ):
        wanted = {name: x for name, x in leaves.items() if x is not None}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        for name, grad in zip(wanted, grads, strict=True):
            sizes["d" + name] = sizes.get("d" + name, 0.0) + (0.0 if grad is None else grad.norm().item())
    return sizes


def _normalizers(case: Case, leaves: dict[str, Tensor | None]) -> Tensor:
    """The sums over all weights of each row, [B, T, H, 1], of leaves in float64."""
    ones = leaves | {"v": torch.ones_like(leaves["v"][..., :1])}
    if case.state:
        ones["s"] = leaves["z"][..., None]
    form = partial(reference.quadratic, p=case.p, scale=case.K**-0.5, normalize=False, eps=case.eps)
    return by_document(replace(case, return_state=False), ones, form)["out"]


def _with_two_tokens(
    form: Callable, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None
) -> tuple:
    """form, which is given a token of zeros after a single one: a sum over one key is no matrix product to
    torch.einsum, and autocast would leave it in float32."""
    if k.shape[1] > 1:
        return form(q, k, v, log_g, state)
    longer = (None if x is None else torch.cat([x, torch.zeros_like(x)], 1) for x in (q, k, v, log_g))
    out, state = form(*longer, state)
    return out[:, :1], state


def _cancelled(
    case: Case, high: dict[str, Tensor | None], oracle: dict[str, Tensor], row_weights: Tensor
) -> dict[str, float]:
    """The norms of the parts of dq, dk, dz and dlog_g that come through the normalizer, as large as if y and dy were
    parallel. In dz nothing cancels but the products of y and dy."""
    names = ("q", "k", "z", "log_g")
    leaves = {name: None if x is None else x.detach().requires_grad_(name in names) for name, x in high.items()}
    z = _normalizers(case, leaves)
    dout = gradients_of(oracle, row_weights)["out"]
    size = dout.norm(dim=-1, keepdim=True) * oracle["out"].norm(dim=-1, keepdim=True)
    wanted = {name: leaves[name] for name in names if leaves[name] is not None}
    grads = torch.autograd.grad((size * (z + case.eps).log()).sum(), list(wanted.values()))
    return {"d" + name: x.norm().item() for name, x in zip(wanted, grads, strict=True)}


@torch.no_grad()
def row_weights_of(case: Case, inputs: dict[str, Tensor | None]) -> Tensor | None:
    """[B, T, H, 1], at most 1: one over the square of the condition of each row's normalizer, the norm of its terms
    phi(q)_d z_d over their sum. None without tokens or a normalizer, or where the condition matters little: p <= 2, no
    state, and documents and what follows a reset long enough that first rows, which have few terms, count little."""
    documents = len(case.ends) if case.ends else 1
    if inputs["log_g"] is not None and inputs["log_g"].numel():
        documents += int((inputs["log_g"] < _RESET).sum(1).max())
    if case.T == 0 or not case.divides or (case.p <= 2 and not case.state and 32 * documents < case.T):
        return None

    def form(q: Tensor, k: Tensor, _: Tensor, log_g: Tensor | None, state: PowerState | None) -> tuple:
        state = state or PowerState.zeros(k.shape[0], case.G, case.K, case.V, case.p, dtype=k.dtype, device=k.device)
        z, outs = state.z, []
        log_g = k.new_zeros(k.shape[:3]) if log_g is None else log_g.clamp(min=-800)
        for queries, keys, gates in zip(*(x.split(_TOKENS, 1) for x in (q, k, log_g)), strict=True):
            sums = gates.cumsum(1)
            past = sums.new_ones(sums.shape[1], sums.shape[1]).tril().log()
            decay = (sums[:, :, None] - sums[:, None] + past[..., None]).exp()
            zs = torch.einsum("btsg,bsgd->btgd", decay, spow(keys, case.p)) + sums.exp()[..., None] * z[:, None]
            terms = spow(queries.unflatten(2, (case.G, -1)), case.p) * zs[:, :, :, None]
            outs.append((terms.sum(-1) / terms.norm(dim=-1)).clamp(max=1.0).square().flatten(2))
            z = zs[:, -1]
        return torch.cat(outs, 1)[..., None], state

    high = {name: None if x is None else x.double() for name, x in inputs.items()}
    return by_document(replace(case, return_state=False), high, form)["out"]
