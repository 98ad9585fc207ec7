"""The utilization of the hardware by a run: model FLOPs utilization, and traces of single steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sympow.models import LanguageModel

# Dense bfloat16 FLOPs a second of the tensor cores, from the vendors' data sheets; by a part of the device's name, the
# first that matches.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def token_flops(model: LanguageModel, context: int) -> float | None:
    """Counts the FLOPs of training on one token of rows of `context`: 6 per element of a matrix, and those of mixers.

    The head counts, tied or not. The embedding does not, because it is looked up. Each row counts as one document.
    Returns None if a mixer does not count its FLOPs.
    """
    mixing = [block.mixer.training_flops(context) for block in model.blocks]
    counted = [flops for flops in mixing if flops is not None]
    if len(counted) < len(mixing):
        return None
    matrices = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not model.config.tie_embeddings:
        matrices -= model.embedding.weight.numel()
    return 6 * matrices + sum(counted) / context


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the FLOPs a second that a device can reach in training at `precision`; None where that is not known."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


@contextmanager
def trace(run_dir: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Gives the function to call after every step.

    Steps 3 to `steps` + 2 are traced into profile/trace.json in the folder, which chrome://tracing and Perfetto can
    show. The trace of a GPU may begin with work of step 2, which the host does not wait for. With 0 steps nothing is
    traced.
    """
    if not steps:
        yield lambda: None
        return
    path = run_dir / "profile" / "trace.json"
    path.parent.mkdir(exist_ok=True)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda profile: profile.export_chrome_trace(str(path))
    ) as profile:
        yield profile.step
