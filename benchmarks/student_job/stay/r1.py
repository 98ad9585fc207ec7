"""Runs of learning: r1.py OUT MINUTES WORKERS PARTS (names with commas)"""
import os, sys
import benchmarks.learning as L
from benchmarks.context_scaling.grid import LONG, MIDDLE
runs = L.runs
H = 'heads_delta+options={"offset":0.09}'
HY = 'hybrid_heads_delta+hybrid_heads.options={"offset":0.09}'
LISTS = {
    "keygate": [r for n in (0, 1, 2) for r in runs(("power+key_gate=16",), (1024,), seeds=(n,))],
    "keygate_4096": [r for n in (0, 1, 2) for r in runs(("power+key_gate=16",), (4096,), seeds=(n,))],
    "bar2": [r for n in (1, 2) for v in (H, "softmax_gate") for r in runs((v,), (4096,), LONG, seeds=(n,))],
    "long_heads": runs((H,), (4096,), LONG, seeds=(0,)),
    "hybrid": runs((HY,), (4096,), MIDDLE),
    "heads_middle": runs((H,), (4096,), MIDDLE),
    "delta_middle": runs(("power_delta+offset=0.09",), (4096,), MIDDLE),
    "repeat": runs(("softmax_gate", "power", "power_delta", "window", "softmax"), (4096,), seeds=(0,)),
    "short_window": [r for r in L.GRIDS["short_first"] if r.variant.startswith("window")],
    "cst_4096": [r for r in L.GRIDS["cst_contexts"] if r.context == 4096],
    **{g: L.GRIDS[g] for g in ("based", "scra_lengths", "scra_bodies", "scra_states", "cst_contexts", "long", "middle",
                               "heads", "middle_16384", "controls", "field", "middle_65536", "search", "short_first", "small", "long_window")},
}
if __name__ == "__main__":
    out, minutes, workers, parts = sys.argv[1:5]
    L.GRIDS["now"] = list(dict.fromkeys(r for p in parts.split(",") for r in LISTS[p]))
    corpus = os.environ.get("CORPUS", "/tmp/corpus")
    sys.argv = ["x", "run", "--grids", "now", "--corpus", corpus, "--out", out, "--workers", workers, "--minutes", minutes]
    sys.argv += ["--scale", "toy"] if os.environ.get("TOY") else ["--compile"]
    raise SystemExit(L.main())
