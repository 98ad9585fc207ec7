"""The types that all implementations of the delta rule share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class DeltaOutput(NamedTuple):
    """Holds what `power_delta_rule` and `power_delta_rule_step` return."""

    out: Tensor
    """[B, T, H, V] in the dtype of v."""
    state: Tensor | None
    """[B, G, D, V] after the last token, float32 (float64 for float64 inputs); None if none was asked for."""


class DeltaOptions(NamedTuple):
    """Holds the options of a call."""

    p: int
    chunk_size: int | None
    return_state: bool


class DeltaGradients(NamedTuple):
    """Holds the gradients of power attention with the values u."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, G, K]
    u: Tensor  # [B, T, G, V]
    log_g: Tensor | None  # [B, T, G]
    state: Tensor | None  # [B, G, D, V], of the incoming state
    kept: Any = None  # what a call with the same keys, values, gates and incoming state can use


class DeltaBackend(Protocol):
    """Lists the functions of a backend: the modules `delta_solve` (plain torch) and `triton.delta`.

    They compute without autograd. Shapes are those of `delta_solve`.
    """

    def solve(
        self, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns the errors e and the updates u = beta e, [B, T, G, V], and the states that `attend` can use."""
        ...

    def solve_gradient(
        self, k: Tensor, errors: Tensor, beta: Tensor, log_g: Tensor | None, du: Tensor, options: DeltaOptions
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of v and beta, given du, that of u through output and last state.

        That of v may be in the memory of du.
        """
        ...

    def attend(
        self, q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, states: Any,
        options: DeltaOptions,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns output and last state of power attention with the values u; `states` are those of `solve`."""
        ...

    def attend_gradient(
        self, q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, last: Tensor | None,
        dout: Tensor, dlast: Tensor | None, options: DeltaOptions, kept: Any = None,
    ) -> DeltaGradients:  # fmt: skip
        """Returns its gradients. `kept` is that of an earlier call, which is used up; no later call has it."""
        ...

    def key_gradient(self, k: Tensor, u: Tensor, dv: Tensor, parts: Sequence[Tensor], p: int) -> Tensor:
        """Returns 2 p (k . k)**(p - 1) (dv . u) k plus the first of `parts` [B, T, G, K] less the other two, as k."""
        ...
