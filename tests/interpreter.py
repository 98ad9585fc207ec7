"""Triton's interpreter without what takes half of its time and changes no result, and with arithmetic in bfloat16 and
tf32."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

_PLACES = [tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]  # where functions are replaced
_language: list[tuple] = []  # each of them with its names, before the interpreter replaces any
_replaced = set()  # device functions whose language the interpreter has replaced


def restore_language() -> None:
    """Undoes what the interpreter has left replaced in triton.language, so that a kernel can be compiled."""
    for place, names in _language:
        for name in [name for name, value in vars(place).items() if names.get(name) is not value]:
            setattr(place, name, names[name]) if name in names else delattr(place, name)
    _replaced.clear()


def speed_up() -> None:
    """Leaves out four things, in this process.

    The interpreter replaces the functions of triton.language by its own at every call of a device function. The first
    call is enough: the kernel around it does so too. It checks every sum and product of integers for an overflow,
    which no index of a test's small shapes can have. It makes a table of all dtypes wherever it needs one of them. And
    for every number it makes the type again, each size in it an object with a type of its own.
    """
    builder = triton_interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    function = triton_interpreter.InterpretedFunction
    replacing = function.__call__

    def call(self, *arguments, **options):
        if self.fn in _replaced:
            return self.rewrite()(*arguments, **options)
        _replaced.add(self.fn)
        return replacing(self, *arguments, **options)

    function.__call__ = call

    of_any = triton_interpreter._get_np_dtype
    of_numbers = cache(of_any)

    def numpy_dtype(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return of_any(kind) if isinstance(kind, tl.pointer_type) else of_numbers(kind)

    triton_interpreter._get_np_dtype = numpy_dtype
    _make_types_once()
    _language[:] = [(place, dict(vars(place))) for place in _PLACES]


def _make_types_once() -> None:
    """Lets types of the same element and shape, and tensors of the same type, share what is made of the shape.

    Two numbers of the same type need no conversion and no broadcast, and a whole number is made a tensor once.
    """
    block_type, tensor, semantic = tl.core.block_type, tl.tensor, type(triton_interpreter.interpreter_semantic)
    new_type, new_tensor, broadcast, check, equal = (
        block_type.__init__, tensor.__init__, semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl,
        tl.dtype.__eq__,
    )  # fmt: skip
    convert, constant = semantic.to_tensor, semantic.scalar_constant
    types: dict[tuple, dict] = {}
    tensors: dict[tuple, dict] = {}
    numbers: dict[int, tl.tensor] = {}
    constants: dict[tuple[int, str], tl.tensor] = {}

    def init_type(self, element_ty, shape):
        key = (element_ty.name, *(x.value if isinstance(x, tl.constexpr) else x for x in shape))
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def init_tensor(self, handle, type):
        key = tuple(type.shape) if isinstance(type, block_type) else None
        if key not in tensors:
            new_tensor(self, handle, type)
            tensors[key] = dict(vars(self))
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def broadcast_impl_value(self, a, b):
        alike = isinstance(a.type, block_type) and isinstance(b.type, block_type) and a.shape is b.shape
        return (a, b) if alike else broadcast(self, a, b)

    def binary_op_type_checking_impl(self, a, b, a_ptr=False, b_ptr=False, arithmetic_check=True, div_or_mod=False):
        if not div_or_mod and isinstance(a, tensor) and isinstance(b, tensor):
            alike = a.type is b.type or (
                isinstance(a.type, block_type) and isinstance(b.type, block_type) and a.type.shape is b.type.shape
            )
            if alike and not a.dtype.is_ptr():
                return a, b
        return check(self, a, b, a_ptr, b_ptr, arithmetic_check, div_or_mod)

    def to_tensor(self, x, check_type=True):
        if type(x) is not int:
            return convert(self, x, check_type)
        if x not in numbers:
            numbers[x] = convert(self, x, check_type)
        return numbers[x]

    def scalar_constant(self, value, dtype):
        if type(value) is not int:
            return constant(self, value, dtype)
        if (value, dtype.name) not in constants:
            constants[value, dtype.name] = constant(self, value, dtype)
        return constants[value, dtype.name]

    block_type.__init__, tensor.__init__, semantic.broadcast_impl_value = init_type, init_tensor, broadcast_impl_value
    semantic.to_tensor, semantic.scalar_constant = to_tensor, scalar_constant
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def compute_in_bfloat16() -> None:
    """Makes the interpreter, in this process, compute in bfloat16 as a GPU does.

    NumPy has no bfloat16. The interpreter holds such numbers as 16 bits, multiplies the bits as integers, and cuts
    bits off where it rounds to bfloat16. Here operations are float32, and their results are rounded to the nearest.
    """
    handle, builder = triton_interpreter.TensorHandle, triton_interpreter.InterpreterBuilder
    binary, unary, dot, cast = builder.binary_op, builder.unary_op, builder.create_dot, builder.cast_impl

    def is_brain(x):
        return x.dtype.scalar == tl.bfloat16

    def wide(x):
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if is_brain(x) else x

    def rounded(x):
        bits = torch.from_numpy(np.ascontiguousarray(x.data, np.float32)).bfloat16().view(torch.uint16)
        return handle(bits.numpy(), tl.bfloat16)

    def binary_op(self, a, b, op):
        if not is_brain(a):
            return binary(self, a, b, op)
        out = op(wide(a).data, wide(b).data)
        return handle(out, tl.int1) if out.dtype == bool else rounded(handle(out, tl.float32))

    def unary_op(self, x, op):
        return rounded(unary(self, wide(x), op)) if is_brain(x) else unary(self, x, op)

    def create_dot(self, a, b, *rest):
        return dot(self, wide(a), wide(b), *rest)

    def cast_impl(self, x, kind):
        if kind.scalar == tl.bfloat16:
            return x if is_brain(x) else rounded(cast(self, x, tl.float32))
        return cast(self, wide(x), kind)

    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.create_dot, builder.cast_impl = create_dot, cast_impl


def multiply_in_tf32() -> None:
    """Makes the interpreter, in this process, cut factors of products in tf32 as tensor cores do: they read the first
    19 bits of a float32. The interpreter takes all bits."""
    handle, builder = triton_interpreter.TensorHandle, triton_interpreter.InterpreterBuilder
    dot = builder.create_dot

    def cut(x):
        bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return handle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, d, precision, *rest):
        if precision.name == "TF32" and a.dtype.scalar == tl.float32:
            a, b = cut(a), cut(b)
        return dot(self, a, b, d, precision, *rest)

    builder.create_dot = create_dot
