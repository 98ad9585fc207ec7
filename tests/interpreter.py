"""Triton's interpreter without what takes half of its time and changes no result."""

from dataclasses import replace
from functools import cache

import triton.language as tl
import triton.runtime.interpreter as triton_interpreter


def speed_up() -> None:
    """Leaves out three things, in this process.

    The interpreter replaces the functions of triton.language by its own at every call of a device function. The first
    call is enough: the kernel around it does so too. It checks every sum and product of integers for an overflow,
    which no index of a test's small shapes can have. And it makes a table of all dtypes wherever it needs one of them.
    """
    builder = triton_interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    function = triton_interpreter.InterpretedFunction
    replacing, replaced = function.__call__, set()

    def call(self, *arguments, **options):
        if self.fn in replaced:
            return self.rewrite()(*arguments, **options)
        replaced.add(self.fn)
        return replacing(self, *arguments, **options)

    function.__call__ = call

    of_any = triton_interpreter._get_np_dtype
    of_numbers = cache(of_any)

    def numpy_dtype(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return of_any(kind) if isinstance(kind, tl.pointer_type) else of_numbers(kind)

    triton_interpreter._get_np_dtype = numpy_dtype
