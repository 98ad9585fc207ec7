"""Computes the numbers of docs/theory.md: the work of recall, circuits, and recall from a state of few bits."""

from __future__ import annotations

import argparse
from pathlib import Path

from sympow.recall import write_results
from sympow.recall.theory.circuits import circuit_as_base_conv, fourier_circuit, planned
from sympow.recall.theory.index_problem import Memory, accuracy, most_possible, retnet
from sympow.recall.theory.instances import draw
from sympow.recall.theory.parallel import recall_all_pairs, recall_in_blocks, recall_one_by_one
from sympow.recall.theory.sorting import recall_circuit

ALGORITHMS = {"one by one": recall_one_by_one, "all pairs": recall_all_pairs, "in blocks": recall_in_blocks}
MEMORIES = [retnet(8, heads=3), Memory("power p=1", 1, 16), Memory("power p=2", 2, 8), Memory("power p=3", 3, 6)]
ROWS = 32  # of every accuracy
SHARES = (64, 16, 4, 1, 1 / 2, 1 / 4, 1 / 8)  # bits of the state for every stored bit


def work() -> list[dict[str, object]]:
    """Returns rows of the work and depth of every algorithm at N = 64, 128, ... 16,384 triples."""
    rows = []
    for size in (64 << i for i in range(9)):
        instances = draw(1, size, 2 * size, seed=0)
        for name, recall in ALGORITHMS.items():
            cost = recall(instances)[1]
            rows.append({"algorithm": name, "triples": size, "work": cost.work, "depth": cost.depth})
    return rows


def circuits() -> list[dict[str, object]]:
    """Returns rows of the size of circuits, and of their BaseConv models."""
    named = [("Fourier transform", size, fourier_circuit(size)) for size in (4, 16, 64)]
    named += [("recall", n, recall_circuit(n, (2 * n - 1).bit_length())) for n in (2, 4, 8, 16)]
    rows = []
    for name, size, circuit in named:
        plan, model = planned(circuit), circuit_as_base_conv(circuit, 16)
        rows.append({"circuit": name, "of": size, "size": circuit.size, "depth": circuit.depth, "width": plan.width,
                     "levels": len(plan.levels), "layers": sum(1 for _ in model.layers()), "rows": model.rows,
                     "channels": 3 * model.width})  # fmt: skip
    return rows


def index() -> list[dict[str, object]]:
    """Returns rows of the accuracy of every memory against the bits of its state per stored bit."""
    found = []
    for memory in MEMORIES:
        for share in SHARES:
            stored = max(1, round(memory.state_bits / share))
            told = accuracy(memory, stored, ROWS, seed=0)
            found.append({"memory": memory.label, "state_bits": memory.state_bits, "stored": stored,
                          "accuracy": round(told, 4), "bound": round(most_possible(min(1.0, share)), 4)})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.theory", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the three CSV files")
    args = parser.parse_args()
    tables = (("work", work()), ("index", index()), ("circuits", circuits()))
    for name, rows in tables:
        write_results(args.out / f"theory_{name}.csv", rows)
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
