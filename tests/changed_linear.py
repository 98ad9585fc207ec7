"""Changes of a linear layer that double its output or its gradient. A product with its weight does not show them."""

from collections.abc import Callable

from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as all_modules

Undo = Callable[[], None]


def own_forward(linear: nn.Linear) -> Undo:
    linear.forward = lambda x: 2 * F.linear(x, linear.weight, linear.bias)
    return lambda: delattr(linear, "forward")


def hook(linear: nn.Linear) -> Undo:
    return linear.register_forward_hook(lambda module, given, out: 2 * out).remove


def earlier_hook(linear: nn.Linear) -> Undo:
    return linear.register_forward_pre_hook(lambda module, given: (2 * given[0],)).remove


def backward_hook(linear: nn.Linear) -> Undo:
    return linear.register_full_backward_hook(lambda module, found, given: (2 * found[0],)).remove


def earlier_backward_hook(linear: nn.Linear) -> Undo:
    return linear.register_full_backward_pre_hook(lambda module, given: (2 * given[0],)).remove


def hook_of_all(linear: nn.Linear) -> Undo:
    return all_modules.register_module_forward_hook(
        lambda module, given, out: 2 * out if module is linear else None
    ).remove


def earlier_hook_of_all(linear: nn.Linear) -> Undo:
    return all_modules.register_module_forward_pre_hook(
        lambda module, given: (2 * given[0],) if module is linear else None
    ).remove


def backward_hook_of_all(linear: nn.Linear) -> Undo:
    return all_modules.register_module_full_backward_hook(
        lambda module, found, given: (2 * found[0],) if module is linear else None
    ).remove


def earlier_backward_hook_of_all(linear: nn.Linear) -> Undo:
    return all_modules.register_module_full_backward_pre_hook(
        lambda module, given: (2 * given[0],) if module is linear else None
    ).remove


CHANGES = [
    own_forward, hook, earlier_hook, backward_hook, earlier_backward_hook,
    hook_of_all, earlier_hook_of_all, backward_hook_of_all, earlier_backward_hook_of_all,
]  # fmt: skip
