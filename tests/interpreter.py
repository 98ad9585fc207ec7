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
_ALL = slice(None)  # `:`
_replaced = set()  # device functions whose language the interpreter has replaced


def restore_language() -> None:
    """Undoes what the interpreter has left replaced in triton.language, so that a kernel can be compiled."""
    for place, names in _language:
        for name in [name for name, value in vars(place).items() if names.get(name) is not value]:
            setattr(place, name, names[name]) if name in names else delattr(place, name)
    _replaced.clear()


def speed_up() -> None:
    """Leaves out five things, in this process.

    The interpreter replaces the functions of triton.language by its own at every call of a device function. The first
    call is enough: the kernel around it does so too. It checks every sum and product of integers for an overflow,
    which no index of a test's small shapes can have. It makes a table of all dtypes wherever it needs one of them. For
    every number it makes the type again, each size in it an object with a type of its own. And an operator between
    tensors goes through a dozen functions before NumPy computes it.
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
    _shorten_operators()
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


def _shorten_operators() -> None:
    """Lets operators go straight to the call of NumPy that the interpreter comes to.

    These are operators between tensors of the same dtype, between integers, between a tensor and a number, and between
    a pointer and an offset. NumPy broadcasts as Triton does. A load goes straight to the interpreter's own, and
    `x[:, None]` is a view. Whatever else is asked for goes the long way.
    """
    tensor, handle, constexpr, block_type = tl.tensor, triton_interpreter.TensorHandle, tl.constexpr, tl.core.block_type
    floats = {tl.float32.name: np.float32, tl.float64.name: np.float64, tl.float16.name: np.float16}
    integers = {tl.int32.name: np.int32, tl.int64.name: np.int64}
    numbers = floats | integers
    wide = {name: floats[name] for name in (tl.float32.name, tl.float64.name)}  # of whose quotients the type is theirs
    bits = {tl.int1.name: np.bool_, **integers}
    least = {name: np.iinfo(kind) for name, kind in integers.items()}
    blocks: dict[tuple, dict] = {}

    def made(data, dtype, shape):
        """A tensor of a dtype with a block's shape, or () for a number."""
        key = (dtype.name, getattr(dtype, "address_space", None), shape)
        if key not in blocks:
            blocks[key] = dict(vars(tensor(None, block_type(dtype, list(shape)) if shape else dtype)))
        holder, out = object.__new__(handle), object.__new__(tensor)
        holder.data, holder.dtype, holder.attr = data, dtype, {}
        vars(out).update(blocks[key], handle=holder)
        return out

    def number_of(value, name):
        """A Python number as the dtype of the tensor beside it has it, or None where that is not so simple."""
        if name in floats and type(value) in (int, float):
            return floats[name](value)
        if type(value) is int and name in integers and least[name].min <= value <= least[name].max:
            return integers[name](value)
        return None

    def size_at(pointer):
        """The bytes of what a pointer points to."""
        return max(1, pointer.element_ty.primitive_bitwidth // 8)

    def shortened(operation, kinds, gives=None, swapped=False, pointers=False):
        def short(a, b):
            dtype, name, x = a.dtype, a.dtype.name, a.handle.data
            if type(b) is constexpr:
                b = b.value
            if type(b) is tensor:
                y, shape = b.handle.data, a.shape or b.shape
                if name != b.dtype.name:
                    if b.dtype.name not in integers:
                        return None
                    if pointers and dtype.is_ptr():
                        out = x + size_at(dtype) * y.astype(np.uint64)
                        return made(out, dtype, out.shape if shape else ())
                    if name not in integers or kinds is not numbers:
                        return None
                    dtype = tl.int64
                elif name not in kinds:
                    return None
            elif pointers and type(b) is int and b >= 0 and dtype.is_ptr():
                return made(x + np.uint64(size_at(dtype) * b), dtype, x.shape if a.shape else ())
            else:
                y, shape = number_of(b, name) if name in kinds else None, a.shape
                if y is None:
                    return None
            out = operation(y, x) if swapped else operation(x, y)
            return made(out, gives or dtype, out.shape if shape else ())

        return short

    def quotient(x, y):
        return (x - np.fmod(x, y)) // y

    def viewed(x, index):
        if not x.shape or type(index) is not tuple or not all(each is None or each == _ALL for each in index):
            return None
        data = x.handle.data[index]
        return made(data, x.dtype, data.shape)

    operators = {
        "__add__": shortened(np.add, numbers, pointers=True),
        "__radd__": shortened(np.add, numbers, swapped=True),
        "__sub__": shortened(np.subtract, numbers),
        "__rsub__": shortened(np.subtract, numbers, swapped=True),
        "__mul__": shortened(np.multiply, numbers),
        "__rmul__": shortened(np.multiply, numbers, swapped=True),
        "__truediv__": shortened(np.divide, wide),
        "__rtruediv__": shortened(np.divide, wide, swapped=True),
        "__floordiv__": shortened(quotient, integers),
        "__mod__": shortened(np.fmod, integers),
        "__lt__": shortened(np.less, numbers, tl.int1),
        "__le__": shortened(np.less_equal, numbers, tl.int1),
        "__gt__": shortened(np.greater, numbers, tl.int1),
        "__ge__": shortened(np.greater_equal, numbers, tl.int1),
        "__eq__": shortened(np.equal, numbers, tl.int1),
        "__ne__": shortened(np.not_equal, numbers, tl.int1),
        "__and__": shortened(np.bitwise_and, bits),
        "__or__": shortened(np.bitwise_or, bits),
        "__getitem__": viewed,
    }

    stored = {**numbers, tl.bfloat16.name: np.uint16}
    known = set()  # options of loads that the long way has checked

    def load(pointer, mask=None, other=None, **options):
        """A load through pointers, of zeros where there is a mask."""
        if type(other) is constexpr:
            other = other.value
        element = getattr(pointer.dtype, "element_ty", None) if type(pointer) is tensor else None
        kind = stored.get(getattr(element, "name", None))
        masked = mask is None or (type(mask) is tensor and mask.dtype.name == tl.int1.name)
        as_usual = masked and (other is None or (type(other) in (int, float) and other == 0 and mask is not None))
        if kind is None or not as_usual or (mask is not None and mask.shape and not pointer.shape):
            return None
        checked = tuple((name, each.value if type(each) is constexpr else each) for name, each in options.items())
        if checked not in known:
            known.add(checked)
            return None
        at, there = pointer.handle.data, None if mask is None else mask.handle.data
        if mask is None:
            there = np.ones(at.shape, bool)
        elif there.shape != at.shape:
            at, there = np.broadcast_arrays(at, there)
        out = triton_interpreter._interpreter.load(at, there, np.zeros(at.shape, kind), np.dtype(kind))
        return made(out, element, at.shape if pointer.shape else ())

    def installed(short, long):
        def operator(*arguments, **options):
            found = short(*arguments, **options)
            return long(*arguments, **options) if found is None else found

        operator.short = short
        return operator

    replacing = triton_interpreter._patch_lang

    def patch_lang(fn):
        scope = replacing(fn)
        for place, name, short in [*((tensor, *each) for each in operators.items()), (tl, "load", load)]:
            if not hasattr(long := getattr(place, name), "short"):
                operator = installed(short, long)
                setattr(place, name, operator) if scope is None else scope.set_attr(place, name, operator)
        return scope

    triton_interpreter._patch_lang = patch_lang


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
