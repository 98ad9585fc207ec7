"""Muon (Jordan et al., 2024) for the matrices of a model, AdamW for its other parameters, as one optimizer.

The state of a matrix is the running average of its gradients, in the shape and the shards of the weight. So checkpoints
and schedules treat this optimizer as they treat AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

MOMENTUM = 0.95
STEPS = 5
# a, b, c of the polynomial a s + b s^3 + c s^5, whose fifth iterate maps singular values of up to 1 to about 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # the least norm that matrices are divided by
BATCH = 1 << 23  # elements of the matrices that a GPU orthogonalizes at once; with fewer, it waits for the host
RMS = 0.2  # of an update's elements, which is about that of AdamW's updates (Liu et al., arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Moves matrices by the orthogonalized average of their gradients, and all other parameters by AdamW.

    The average of a matrix [A, B] is orthogonalized by `orthogonalized` and multiplied by 0.2 sqrt(max(A, B)). Its
    elements then have about the size of AdamW's updates, so that one learning rate and one weight decay serve all
    parameters. The weight decay is decoupled, as in AdamW. Parameters without a gradient stay as they are.

    Sharded weights (DTensor) get the update that one rank would compute: the ranks exchange the averages, each
    orthogonalizes a share of the matrices, and they exchange the results.

    Args:
        matrices: the weights [A, B] that Muon moves, each with the rows of the matrices that are above one another in
            it. The rows add up to A. Every matrix is orthogonalized by itself.
        others: the groups of the parameters that AdamW moves.
        lr: the learning rate of all groups, see `sympow.training.optimizer.set_learning_rate`. A tensor is read in
            every step, also in one that is replayed as a CUDA graph.
        weight_decay: the weight decay of the matrices.
        rate: the factor of the learning rate for the matrices.
        **adamw: options of AdamW.

    Raises ValueError if the rows of a weight do not add up to A.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[nn.Parameter, Sequence[int]]],
        others: list[dict[str, Any]],
        *,
        lr: float | Tensor,
        weight_decay: float,
        rate: float = 1.0,
        **adamw: Any,
    ):
        for weight, rows in matrices:
            if weight.ndim != 2 or sum(rows) != weight.shape[0]:
                raise ValueError(f"a weight of rows {list(rows)} must be a matrix of as many; got {list(weight.shape)}")
        group = {
            "params": [weight for weight, _ in matrices],
            "rows": [list(rows) for _, rows in matrices],
            "rate": rate,
            "weight_decay": weight_decay,
        }
        self._adamw = torch.optim.AdamW(others, lr=lr, **adamw)
        super().__init__([group, *self._adamw.param_groups], {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, see `torch.optim.Optimizer`. AdamW updates it, with its defaults where the group names none.

        The rate of the group is the first one until the next `set_learning_rate`.
        """
        super().add_param_group(param_group if "rows" in param_group else self._adamw.defaults | param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Moves all parameters that have a gradient. Returns what `closure`, called before, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        others = []
        for group in self.param_groups:
            if "rows" in group:
                self._move(group)
            else:
                others.append(group)
        self._adamw.param_groups, self._adamw.state = others, self.state  # load_state_dict makes new ones
        self._adamw.step()
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        """Moves the matrices of a group, those of one shape together."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for weight, rows in zip(group["params"], group["rows"], strict=True):
            if weight.grad is not None:
                layout = (weight.device_mesh, weight.placements) if is_sharded(weight) else None
                alike.setdefault((tuple(rows), weight.shape, weight.dtype, weight.device, layout), []).append(weight)
        rate = group["lr"] * group["rate"]
        for (rows, *_), weights in alike.items():
            own = [_local(weight) for weight in weights]
            updates = self._updates(weights, rows).to(own[0].dtype) * rate
            torch._foreach_mul_(own, 1 - rate * group["weight_decay"])
            torch._foreach_sub_(own, list(updates.unbind()))

    def _updates(self, weights: list[nn.Parameter], rows: Sequence[int]) -> Tensor:
        """Takes the gradients into the averages of weights of one shape; returns this rank's rows of the updates."""
        averages = []
        for weight in weights:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
            averages.append(_local(state["momentum_buffer"]))
        gradients = [_local(weight.grad) for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(averages, gradients, 1 - MOMENTUM)
        ahead = torch.stack(torch._foreach_lerp(gradients, averages, MOMENTUM))  # Nesterov
        ahead = ahead.to(_product_dtype(ahead))

        def updates(stack: Tensor) -> Tensor:
            return torch.cat([_scaled(part) for part in stack.split(list(rows), dim=1)], dim=1)

        like: Any = weights[0]
        return by_whole_matrices(updates, ahead, like) if is_sharded(like) else updates(ahead)


def orthogonalized(matrices: Tensor, scale: float = 1.0) -> Tensor:
    """Returns matrices [N, A, B] with all singular values near `scale`, by Newton-Schulz steps in their dtype.

    The singular values are divided by the Frobenius norm and then mapped five times by 3.4445 s - 4.775 s^3 + 2.0315
    s^5, which moves those above 0.01 into the range of 0.68 to 1.14. A matrix of zeros stays 0.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for step in range(STEPS):
        factor = scale if step == STEPS - 1 else 1.0
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a * factor, alpha=factor)
    return x.mT if tall else x


def by_whole_matrices(function: Callable[[Tensor], Tensor], stack: Tensor, like: DTensor) -> Tensor:
    """Computes function(matrices) on a stack of sharded matrices, every matrix whole on one rank.

    All ranks call this function.

    Args:
        function: maps N whole matrices [N, A, B] to results of this shape, for any N.
        stack: this rank's rows of all matrices, [M, A', B].
        like: one of the sharded weights (DTensor), whose layout all matrices have.

    Returns:
        This rank's rows of the results, [M, A', B].
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

    mesh, shape = like.device_mesh, (len(stack), *like.shape)
    by_row = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in like.placements]
    by_matrix = [Shard(0) if isinstance(place, Shard) else place for place in by_row]
    everything = [Replicate()] * mesh.ndim

    def moved(own: Tensor, before: list[Placement], after: list[Placement]) -> Tensor:
        whole = DTensor.from_local(
            own, mesh, before, run_check=False, shape=torch.Size(shape), stride=(shape[1] * shape[2], shape[2], 1)
        )
        if own.device.type == "cpu":  # where an exchange is a gathering, of which torch would warn
            whole = whole.redistribute(placements=everything)
        return whole.redistribute(placements=after).to_local()

    return moved(function(moved(stack, by_row, by_matrix)), by_matrix, by_row)


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor. To ask does not import DTensor, which takes a second."""
    return hasattr(tensor, "to_local")


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor. Changes of the part are changes of the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of Newton-Schulz steps: bfloat16 for half and single precision, but float32 on CPUs."""
    if x.dtype == torch.float64:
        return x.dtype
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


def _scaled(matrices: Tensor) -> Tensor:
    """Returns the updates of matrices [N, A, B], whose elements have a mean square of about `RMS` squared.

    The rounding of a product may depend on the number of matrices in it. So all batches are equally large and start at
    an address of their own, on any number of ranks: a result does not depend on the matrices beside it.
    """
    rows, columns = matrices.shape[1:]
    size = 1 if matrices.device.type == "cpu" else max(1, BATCH // (rows * columns))
    found = []
    for part in matrices.split(size):
        batch = matrices.new_zeros(size, rows, columns)
        batch[: len(part)] = part
        found.append(orthogonalized(batch, RMS * sqrt(max(rows, columns)))[: len(part)])
    return torch.cat(found)
