"""The environment in which chat templates run. A template comes with a model, so it may be hostile.

Nothing is computed when a template is compiled. A rendering has a budget, so that it ends and takes bounded memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from math import prod
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

BUDGET = 10**9  # characters made in a rendering
_STEP = 10**3  # what an iteration, a call or an output costs beside the characters: a rendering has a million of them
_ITEM = 100  # what an item of a list costs
LONGEST = 5 * 10**7  # characters made at once
_BITS = 10**4  # of an integer
_LEFT = "budget left"  # no name that a template could set

# Methods of texts and filters whose result may be much longer than what they are given.
_GROWING = {"batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "pprint", "replace"}
_GROWING |= {"rjust", "slice", "string", "sum", "tojson", "wordwrap", "zfill"}
# A width of six digits in a format, or one that is an argument: of `%`, then of `str.format`.
_WIDE = re.compile(r"%[-+ #0\d.]*\*|[%)][-+ #0\d.]*\d{6}|\{[^{}:]*:[^{}]*(\{|\d{6})")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Runs templates that were written by others, within bounds. `render` gives each rendering a budget of its own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        super().__init__(optimized=False, finalize=_printed, **options)  # a finalize of contexts: no constant is folded
        self.globals.pop("lipsum")  # makes text of any length
        self.filters |= {name: bounded(name, function) for name, function in self.filters.items()}

    def render(self, template: Any, given: Mapping[str, Any]) -> str:
        """Renders a template of this environment. Raises SecurityError at the bounds, and the template's own errors."""
        return template.render({**given, _LEFT: [BUDGET]})

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> Any:
        """Puts costs into loops and slices, and makes a call of `~`."""
        for node in source.find_all(nodes.Concat):
            node.nodes = [_call("joined", *node.nodes)]
        for part in source.find_all(nodes.Getitem):
            if isinstance(part.arg, nodes.Slice):
                part.node = _call("copied", part.node)
        for loop in source.find_all(nodes.For):
            texts = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            iterated = _call("iterated", nodes.Const(texts))
            if loop.test is None:
                loop.body.insert(0, nodes.Output([iterated]))
            else:
                loop.test = nodes.And(nodes.Not(iterated), loop.test)
        return super()._generate(source, *args, **options)

    @staticmethod
    @pass_context
    def iterated(context: Context, texts: int) -> str:
        """Counts an iteration of a loop with so many characters of text."""
        _spent(context, texts)
        return ""

    @staticmethod
    @pass_context
    def copied(context: Context, value: Any) -> Any:
        """Counts the copy of a text or a list, a part of which is taken."""
        _spent(context, _length(value))
        return value

    @staticmethod
    @pass_context
    def joined(context: Context, *values: Any) -> str:
        """Joins the texts of values, the operator `~`."""
        _spent(context, sum(map(_size, values)))
        return "".join(map(str, values))

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        """Calls a macro, a function or a method."""
        method = getattr(function, "__wrapped__", function)  # `format` is wrapped
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            args = _listed(name, args)
            given = (*args, owner) if name == "join" else (owner, *args)
            _spent(context, _most(name, *given, *options.values()))
        result = super().call(context, function, *args, **options)
        _spent(context, _length(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator whose result may be large."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _BITS:
                raise SecurityError(f"expected integers of at most {_BITS:,} bits; got about {min(bits, 10**18):.1e}")
        elif operator == "*":
            _spent(context, prod(x if isinstance(x, int) else _length(x) for x in (left, right)))
        elif operator == "+":
            _spent(context, _length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            _spent(context, _most("format", left, right))
        return super().call_binop(context, operator, left, right)


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


@pass_context
def _printed(context: Context, value: Any) -> Any:
    _spent(context, _size(value))
    return value


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the filter `function` of this name with its costs."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)  # what Jinja gives as first argument

    @wraps(function)
    def within(context: Context, *args: Any, **options: Any) -> Any:
        args = _listed(name, args)
        _spent(context, _most(name, *args, *options.values()))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(*([first[passed]] if passed else []), *args, **options)
        _spent(context, _length(result))
        return result

    return pass_context(within)


def _spent(context: Context, characters: int) -> None:
    """Takes the cost of a step that makes so many characters from the budget. Raises SecurityError without a rest."""
    if characters > LONGEST:
        shown = f"{min(characters, 10**18):.1e}"
        raise SecurityError(f"expected texts of at most {LONGEST:,} characters; got about {shown}")
    left = context.parent[_LEFT]
    left[0] -= _STEP + characters
    if left[0] < 0:
        raise SecurityError(f"expected at most {BUDGET // _STEP:,} steps and {BUDGET:,} characters; got more")


def _listed(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments with lists in place of iterators, which have no length, where a filter takes them whole."""
    return tuple(list(x) if isinstance(x, Iterator) else x for x in args) if name in _GROWING else args


def _most(name: str, first: Any, *others: Any) -> int:
    """Returns a bound of the characters that a method of a text, or a filter, reads and makes."""
    if name not in _GROWING:
        return _length(first)
    if "format" in name:
        if isinstance(first, str) and _WIDE.search(re.sub(r"%%|\{\{|\}\}", "", first)):
            raise SecurityError("expected a format with widths of at most 5 digits in it")
        return _length(first) * _size(others)
    # A width, or a text, can be put between or around all parts of what is given.
    repeated = [x for x in (others[1:] if name == "replace" else others) if isinstance(x, int | str)]
    return _size(first) * prod(max(1, abs(x) if isinstance(x, int) else len(x)) for x in repeated)


def _length(value: Any) -> int:
    """Returns the characters of a text, or the cost of the items of a collection."""
    if isinstance(value, str):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict | range) else 0


def _size(value: Any) -> int:
    """Returns about the length of the text of a value with all in it. It stops above the bound.

    Raises SecurityError for a namespace, whose text would hold all in it.
    """
    left: list[Any] = [value]
    size = 0
    while left and size <= LONGEST:
        item = left.pop()
        if isinstance(item, Namespace):
            raise SecurityError("expected a text or a list; got a namespace")
        size += max(_ITEM * (not isinstance(item, str)), _length(item))
        if isinstance(item, dict):
            left.extend([*item.keys(), *item.values()])
        elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            left.extend(item)
    return size
