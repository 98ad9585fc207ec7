"""Arithmetic circuits (H.1, H.13), and the BaseConv models that compute them (H.19 to H.21, Theorem 4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.recall.theory.base_conv import Layer, convolution, linear
from sympow.recall.theory.butterfly import Factor, factors_as_base_conv
from sympow.recall.theory.routing import gather

_BATCH = 64  # rows to which a layer is applied at once, so that they stay in the processor's cache


class Gate(NamedTuple):
    """Describes a gate: a x + b y, or x y, of the wires x and y."""

    multiplies: bool
    x: int
    y: int
    a: float = 1.0
    b: float = 1.0


class Circuit:
    """Holds an arithmetic circuit. Wires are numbered: first the inputs, then the constant 1, then each gate's result.

    A gate that was made before is not made again.

    Args:
        inputs: the number of inputs.

    Attributes:
        one: the wire of the constant 1.
        gates: in the order in which they were made; a gate reads wires before its own.
        outputs: the wires of the results; set them when the gates are made.
    """

    def __init__(self, inputs: int):
        self.inputs = self.one = inputs
        self.gates: list[Gate] = []
        self.outputs: list[int] = []
        self._made: dict[Gate, int] = {}

    def add(self, x: int, y: int, a: float = 1.0, b: float = 1.0) -> int:
        """Makes the gate a x + b y of the wires x and y, and returns its wire."""
        return self._gate(Gate(False, x, y, a, b))

    def multiply(self, x: int, y: int) -> int:
        """Makes the gate x y of the wires x and y, and returns its wire."""
        return self._gate(Gate(True, x, y))

    def _gate(self, gate: Gate) -> int:
        wires = self.one + 1 + len(self.gates)
        if not (0 <= gate.x < wires and 0 <= gate.y < wires):
            raise ValueError(f"a gate reads wires 0 to {wires - 1}; got {gate.x} and {gate.y}")
        if gate not in self._made:
            self.gates.append(gate)
            self._made[gate] = wires
        return self._made[gate]

    def __call__(self, u: Tensor) -> Tensor:
        """Computes the outputs for inputs u [n, inputs], gate by gate: [n, outputs]."""
        wires = [*u.unbind(1), torch.ones_like(u[:, 0])]
        for gate in self.gates:
            x, y = wires[gate.x], wires[gate.y]
            wires.append(x * y if gate.multiplies else gate.a * x + gate.b * y)
        return torch.stack([wires[i] for i in self.outputs], dim=1)

    @property
    def size(self) -> int:
        """Returns the number of gates, the work."""
        return len(self.gates)

    @property
    def depth(self) -> int:
        """Returns the number of gates on the longest path to an output."""
        depths = [0] * (self.one + 1)
        for gate in self.gates:
            depths.append(1 + max(depths[gate.x], depths[gate.y]))
        return max((depths[i] for i in self.outputs), default=0)


class Level(NamedTuple):
    """Describes gates of one kind that are computed at once. Their wires are numbered by the place before the level.

    The gates write their results to places 0, 1, ... Wires that later levels need are among the gates: a sum 1 x + 0 x,
    or a product with the constant 1.
    """

    multiplies: bool
    gates: list[Gate]


class Plan(NamedTuple):
    """Describes a circuit in levels.

    Before the first level, the inputs that are used are in places 0, 1, ..., and the constant 1 after them. After the
    last level, the outputs are in the given places, and the constant in place `one`.
    """

    inputs: list[int]
    levels: list[Level]
    outputs: list[int]
    one: int

    @property
    def width(self) -> int:
        """Returns the largest number of wires between two levels."""
        return max([len(self.inputs) + 1, *(len(level.gates) for level in self.levels), len(self.outputs)])


def planned(circuit: Circuit) -> Plan:
    """Sorts the gates of a circuit into levels of sums or products alone, each as late as possible (H.5).

    Gates that no output depends on are left out.
    """
    first = circuit.one + 1
    level_of = _levels(circuit)
    end = max(level_of.values(), default=0) + 1
    last = dict.fromkeys((*circuit.outputs, circuit.one), end)  # the last level that reads a wire
    made: dict[int, list[int]] = {}
    for wire in sorted(level_of):
        made.setdefault(level_of[wire], []).append(wire)
        for read in circuit.gates[wire - first][1:3]:
            last[read] = max(last.get(read, 0), level_of[wire])
    alive = [wire for wire in range(first) if wire in last]
    inputs, found = alive[:-1], []
    for level in sorted(made):
        place = {wire: i for i, wire in enumerate(alive)}
        multiplies = circuit.gates[made[level][0] - first].multiplies
        kept = [wire for wire in alive if last[wire] > level]
        gates = [Gate(multiplies, place[wire], place[circuit.one if multiplies else wire], 1.0, 0.0) for wire in kept]
        for wire in made[level]:
            gate = circuit.gates[wire - first]
            gates.append(gate._replace(x=place[gate.x], y=place[gate.y]))
        alive = [*kept, *made[level]]
        found.append(Level(multiplies, gates))
    return Plan(inputs, found, [alive.index(wire) for wire in circuit.outputs], alive.index(circuit.one))


def _levels(circuit: Circuit) -> dict[int, int]:
    """Returns the level of every gate that an output depends on, by its wire. Levels of sums and products alternate."""
    first = circuit.one + 1
    after = dict.fromkeys(circuit.outputs, 0)  # levels between a wire and the end: even of sums, odd of products
    for wire in range(first + circuit.size - 1, first - 1, -1):
        if wire in after:
            gate = circuit.gates[wire - first]
            after[wire] += int(after[wire] % 2 != gate.multiplies)
            for read in (gate.x, gate.y):
                after[read] = max(after.get(read, 0), after[wire] + 1)
    deepest = max(after.values(), default=0)
    return {wire: deepest - count for wire, count in after.items() if wire >= first}


@dataclass(frozen=True)
class Model:
    """Describes the BaseConv model of a circuit, with `rows` rows and 3 `width` channels, for butterfly factors.

    Attributes:
        inputs: which inputs of the circuit stand on the tape at the start.
        steps: the factors of every level, and whether a product follows them.
        outputs: how many entries at the start of the tape are the results.
        rows: N'. The product of `rows` and `width` is a power of two, at least twice the width of the circuit.
        width: d.
        dtype: of the tape.
    """

    inputs: list[int]
    steps: list[tuple[list[Factor], bool]]
    outputs: int
    rows: int
    width: int
    dtype: torch.dtype

    def layers(self) -> Iterator[Layer]:
        """Makes the layers in order. They are made one by one, because large models do not fit into memory."""
        one, size = len(self.inputs), self.rows * self.width
        constant = pad(torch.ones(1, dtype=self.dtype), (one, size - one - 1)).view(self.rows, self.width)
        yield linear(self.rows, torch.eye(3 * self.width, dtype=self.dtype), pad(constant, (0, 2 * self.width)))
        for factors, multiplies in self.steps:
            typed = [Factor(each.block, each.own.to(self.dtype), each.other.to(self.dtype)) for each in factors]
            yield from factors_as_base_conv(typed, self.width)
            if multiplies:
                yield self._product()

    def __call__(self, u: Tensor) -> Tensor:
        """Computes the outputs for inputs u [n, inputs of the circuit]: [n, outputs], in the dtype of the tape."""
        x = pad(u[:, self.inputs].to(self.dtype), (0, self.rows * self.width - len(self.inputs)))
        tapes = pad(x.view(-1, self.rows, self.width), (0, 2 * self.width)).split(_BATCH)
        for layer in self.layers():
            tapes = tuple(layer(tape) for tape in tapes)
        return torch.cat(tapes)[..., : self.width].flatten(1)[:, : self.outputs]

    def _product(self) -> Layer:
        """Makes the layer that multiplies each half of the tape with the other."""
        weight = torch.zeros(3 * self.width, 3 * self.width, dtype=self.dtype)
        weight[: self.width, : self.width] = torch.eye(self.width)
        kernel = torch.zeros(self.rows, 3 * self.width, dtype=self.dtype)
        kernel[self.rows // 2, : self.width] = 1
        return replace(convolution(self.rows, kernel, mask=0.0, circular=True), weight=weight)


def circuit_as_base_conv(circuit: Circuit, width: int = 1, dtype: torch.dtype = torch.float64) -> Model:
    """Makes the BaseConv model that computes a circuit (Theorem H.21, which is Theorem 4.2).

    The wires between two levels stand on the tape one after another. For each level, a copying and a permuting network
    bring the first operand of gate i to place i, and the second half a tape further on (H.19). A level of sums is then
    one more butterfly factor, with a and b of each gate as its diagonals (H.20). A level of products is one gated
    convolution. Wires of later levels pass through gates of their own. The source keeps them by the primitive of H.10.

    Args:
        circuit: with outputs.
        width: d, a power of two. A factor whose partners are fewer than d places apart takes one layer, not two.
        dtype: of the tape.

    Raises ValueError for a circuit without outputs.
    """
    if not circuit.outputs:
        raise ValueError("a circuit must have outputs; got none")
    plan = planned(circuit)
    half = max(1 << (plan.width - 1).bit_length(), width)
    steps = []
    for level in plan.levels:
        source: list[int | None] = [None] * (2 * half)
        a, b = torch.zeros(2, 2 * half, dtype=torch.float64)
        for i, gate in enumerate(level.gates):
            source[i], source[half + i] = gate.x, gate.y
            a[i], b[i] = gate.a, gate.b
        sums = [] if level.multiplies else [Factor(2 * half, a, b)]
        steps.append(([*gather(source, 2 * half), *sums], level.multiplies))
    steps.append((gather([*plan.outputs, plan.one], 2 * half), False))
    return Model(plan.inputs, steps, len(plan.outputs), 2 * half // width, width, dtype)


def fourier_circuit(size: int) -> Circuit:
    """Makes the linear circuit of the fast Fourier transform of `size` complex numbers, a power of two.

    The inputs and the outputs are the real parts, and then the imaginary parts.
    """
    circuit, bits = Circuit(2 * size), size.bit_length() - 1
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(size)]
    real, imaginary = order, [size + i for i in order]
    for level in range(bits):
        half = 1 << level
        made: list[list[int]] = [[0] * size, [0] * size]
        for i in (i for i in range(size) if not i & half):
            angle = -math.pi * (i % half) / half
            x, y = real[i + half], imaginary[i + half]
            turned = (circuit.add(x, y, math.cos(angle), -math.sin(angle)),
                      circuit.add(y, x, math.cos(angle), math.sin(angle)))  # fmt: skip
            for part, before, wire in zip(made, (real, imaginary), turned, strict=True):
                part[i], part[i + half] = circuit.add(before[i], wire), circuit.add(before[i], wire, 1.0, -1.0)
        real, imaginary = made
    circuit.outputs = [*real, *imaginary]
    return circuit
