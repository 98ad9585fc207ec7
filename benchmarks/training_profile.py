"""Shows where the GPU's time in a training step goes: `python -m benchmarks.training_profile --csv FILE`.

The step is that of `benchmarks.training`, compiled. The profiler of PyTorch records every kernel of a few steps after
the first ones. A row of FILE is a kernel: its launches and its milliseconds in a step, the largest first. The profiler
slows the host, so the time of a whole step is that of `benchmarks.training`, without the profiler.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common.measure import csv_file, measured, write
from benchmarks.training import MIXERS, Shape, attention, launcher
from sympow.training.ranks import ALONE
from sympow.training.step import StepNumbers

WARM_UP = 4  # steps before those that are recorded; the first compiles
SHOWN = 40  # kernels that are printed


def step_of(shape: Shape, mixer: str, device: torch.device) -> Callable[[], StepNumbers]:
    """Returns a function that launches a training step of the compiled model."""
    _, _, launch = launcher(shape.config(mixer, "compile", device.type, 1), [shape.passes(0, ALONE)], device)

    def step() -> StepNumbers:
        with attention(mixer, device):
            return launch(0)

    return step


def profiled(step: Callable[[], StepNumbers], count: int) -> list[Any]:
    """Returns the events of the GPU in `count` steps, of which each is launched before the one before it has ended."""
    for _ in range(WARM_UP):
        step().read()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        following = step()
        for _ in range(count - 1):
            current, following = following, step()
            current.read()
        following.read()
        torch.cuda.synchronize()
    return [x for x in profiler.events() if x.device_type == torch.autograd.DeviceType.CUDA]


def kernels(events: Sequence[Any], count: int) -> tuple[list[dict[str, Any]], float, float]:
    """Returns the rows of kernels, the milliseconds in which the GPU computes, and those from the begin of the first
    kernel to the end of the last; all of one step, as means over `count` steps."""
    if not events:
        raise RuntimeError("the profiler saw no kernel on the GPU")
    times: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, -math.inf
    for event in sorted(events, key=lambda x: x.time_range.start):
        span = event.time_range
        times[event.name].append(span.end - span.start)
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    rows = [
        {"kernel": name, "launches": round(len(us) / count, 2), "ms": round(sum(us) / count / 1e3, 3)}
        for name, us in times.items()
    ]
    whole = end - min(x.time_range.start for x in events)
    return sorted(rows, key=lambda row: -row["ms"]), busy / count / 1e3, whole / count / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_profile", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small", help="shape of the model (default: small)")
    parser.add_argument("--vocabulary", type=int, default=50_257, help="(default: 50257)")
    parser.add_argument("--context", type=int, default=65_536, help="(default: 65536)")
    parser.add_argument("--rows", type=int, default=1, help="of a step (default: 1)")
    parser.add_argument("--mixer", choices=MIXERS, default="power", help="(default: power)")
    parser.add_argument("--steps", type=int, default=4, help="that are recorded (default: 4)")
    parser.add_argument("--csv", type=csv_file, required=True, help="file of the rows")
    args = parser.parse_args()
    device = torch.device("cuda")
    shape = Shape(args.preset, args.vocabulary, args.context, args.rows, args.rows)
    rows, busy, span = kernels(profiled(step_of(shape, args.mixer, device), args.steps), args.steps)
    for row in rows[:SHOWN]:
        print(f"{row['ms']:>9.3f} ms {row['launches']:>7.1f}  {row['kernel'][:110]}")
    print(f"{busy:.1f} ms of kernels in {span:.1f} ms a step")
    about = {"preset": args.preset, "context": args.context, "rows": args.rows, "mixer": args.mixer}
    whole = about | {"busy_ms": round(busy, 3), "span_ms": round(span, 3)} | measured("cuda")
    write(args.csv, [whole, *rows])


if __name__ == "__main__":
    main()
