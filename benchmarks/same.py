"""Compares the results and the kernels of calls in another version and in this one: `python -m benchmarks.same --base
FOLDER`.

FOLDER holds the files of the other version, as `git worktree add FOLDER COMMIT` makes it. Each version computes the
same calls in a process of its own, which takes only the package `sympow` from there. Equal are all bits of outputs,
states and gradients and, on a GPU, the launches of kernels: names, grids, blocks and shared memory. A result that
varies from call to call in one of the versions is not compared.

A line of benchmarks/results/same.csv says how many calls were compared and how many differ. If none does, what was
measured on that kind of device with the other version holds for this one. `benchmarks.tables` then calls no file of it
stale, but those that measure the host (`code_hash.OF_HOST`). Calls that generate are counted by themselves: where they
differ, files that time such calls (`code_hash.OF_GENERATING`) are stale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.common.code_hash import PARTS, SAME, hash_of_files
from benchmarks.common.measure import commit, known, measured, refuses, write

if TYPE_CHECKING:
    from sympow.models import LanguageModel

HERE = Path(__file__).parents[1]
Call = Callable[[], list[Tensor]]
# Sizes of calls by device: without a GPU, those of the implementation in plain torch.
LENGTHS = {"cpu": (1, 40, 600), "cuda": (1, 200, 1024, 4096, 16384)}
LONG = {"cpu": 2000, "cuda": 65536}
SHAPES = {"cpu": ((2, 64), (1, 64), (2, 16), (2, 32), (3, 16), (4, 16), (6, 16)),
          "cuda": ((2, 64), (1, 64), (2, 32), (2, 128), (3, 32), (4, 16), (6, 16))}  # p, K  # fmt: skip
OTHER_DTYPES, OTHER_SHAPES, OTHER_LENGTHS = (torch.float32, torch.float16), 2, 3  # the first shapes and lengths
HEADS = (6, 2)  # query heads, and key/value heads if they share
VARIES = "varies"
GENERATION = "generation"  # first word of the names of calls that generate
MODELS = (("power", {"p": 2}), ("power", {"p": 2, "rotation": "data"}), ("power_delta", {"p": 2}))  # mixers, options


def inputs(device: str, T: int, H: int, G: int, K: int, dtype: torch.dtype, B: int = 1) -> dict[str, Tensor]:
    """Returns q, k, v, log_g and beta, which require gradients; values have the key dim."""
    gen = torch.Generator().manual_seed(T + 7 * K)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(B, T, *sizes, generator=gen)

    made = {"q": normal(H, K).to(dtype), "k": normal(G, K).to(dtype), "v": normal(G, K).to(dtype)}
    made["log_g"] = logsigmoid(normal(G) + torch.linspace(1, 8, G))
    made["beta"] = normal(G).sigmoid()
    return {name: x.to(device).requires_grad_() for name, x in made.items()}


def results(op: Callable, given: dict[str, Tensor], **options) -> list[Tensor]:
    """Returns the output and the states of an op, and the gradients of all inputs for fixed gradients of these."""
    out, state = op(**given, **options)
    found = [out, *([] if state is None else [state] if isinstance(state, Tensor) else [state.s, state.z])]
    gen = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=gen).to(x.device, x.dtype) for x in found]
    leaves = [x for x in given.values() if x.requires_grad]
    return found + [x for x in torch.autograd.grad(found, leaves, weights, allow_unused=True) if x is not None]


def without_gradients(op: Callable, given: dict[str, Tensor], **options) -> list[Tensor]:
    """Returns the output of two calls, of which the second may remember the first."""
    with torch.no_grad():
        return [op(**given, **options).out for _ in range(2)]


def steps(op: Callable, step: Callable, given: dict[str, Tensor], **options) -> list[Tensor]:
    """Returns the outputs of tokens read one after the other, behind the others."""
    from sympow.ops import DecodingState, PowerState

    with torch.no_grad():
        state = op(**{name: x[:, :-4] for name, x in given.items()}, return_state=True, **options).state
        state = DecodingState.from_state(state) if isinstance(state, PowerState) else state
        outs = []
        for t in range(-4, 0):
            out, state = step(**{name: x[:, t:][:, :1] for name, x in given.items()}, state=state, **options)
            outs.append(out)
    return outs


def calls(device: str) -> Iterator[tuple[str, Call]]:
    """Yields the calls of the ops and of small models, by name."""
    from sympow.ops import power_attention, power_attention_step, power_delta_rule, power_delta_rule_step

    H, G = HEADS
    some = [(p, K, T, torch.bfloat16) for p, K in SHAPES[device] for T in LENGTHS[device]]
    some += [(p, K, T, dtype) for dtype in OTHER_DTYPES for p, K in SHAPES[device][:OTHER_SHAPES]
             for T in LENGTHS[device][:OTHER_LENGTHS]]  # fmt: skip
    for p, K, T, dtype in some:
        for groups in (H, G):
            name = f"p {p} K {K} T {T} G {groups} {dtype}"
            given = inputs(device, T, H, groups, K, dtype, B=2 if T < 4096 else 1)
            power = {x: given[x] for x in ("q", "k", "v", "log_g")}
            plain = {x: given[x] for x in ("q", "k", "v")}
            options = {"p": p, "normalize": p % 2 == 0}
            yield f"{name}, gradients", partial(results, power_attention, power, **options)
            yield f"{name}, no gradients", partial(without_gradients, power_attention, power, **options)
            yield f"{name}, no gate", partial(results, power_attention, plain, **options)
            if p > 4:  # has no state
                continue
            yield f"{name}, state", partial(results, power_attention, power, return_state=True, **options)
            if T > 4:
                yield f"{name}, steps", partial(steps, power_attention, power_attention_step, power, **options)
            if dtype != torch.float16:
                yield f"{name}, delta rule", partial(results, power_delta_rule, given, p=p, return_state=True)
                if T > 4:
                    own = partial(steps, power_delta_rule, power_delta_rule_step, given, p=p)
                    yield f"{name}, steps of the delta rule", own
    given = inputs(device, LONG[device], H, G, SHAPES[device][0][1], torch.bfloat16)
    packed = torch.tensor([0, 1, 1, 30, LONG[device]], dtype=torch.int32, device=device)
    power = {x: given[x] for x in ("q", "k", "v", "log_g")}
    for p in (1, 2):
        yield f"long p {p}", partial(results, power_attention, power, p=p, normalize=p == 2)
        options = {"p": p, "normalize": p == 2, "cu_seqlens": packed, "return_state": True}
        yield f"packed p {p}", partial(results, power_attention, power, **options)
    yield "packed delta", partial(results, power_delta_rule, given, p=2, cu_seqlens=packed, return_state=True)
    for mixer, own in MODELS:
        yield f"model {mixer} {own}", partial(model, mixer, own, device)
        yield f"{GENERATION} {mixer} {own}", partial(generation, mixer, own, device)


def model(mixer: str, options: dict[str, object], device: str) -> list[Tensor]:
    """Returns the loss of a small model, and the gradients of its weights."""
    own, tokens = small(mixer, options, device)
    with torch.autocast(device, torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(own(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [x for x in own.parameters() if x.requires_grad], allow_unused=True)
    return [loss, *(x for x in gradients if x is not None)]


def generation(mixer: str, options: dict[str, object], device: str) -> list[Tensor]:
    """Returns tokens that a small model generates."""
    from sympow.models import generate

    own, tokens = small(mixer, options, device)
    return [generate(own, tokens[:, :16], 24).tokens]


def small(mixer: str, options: dict[str, object], device: str) -> tuple[LanguageModel, Tensor]:
    """Returns a small model, and tokens for it."""
    from sympow.models import LanguageModel, MixerConfig, ModelConfig

    kind = MixerConfig(mixer, options)
    own = LanguageModel(ModelConfig(256, d_model=128, n_layers=2, n_heads=2, mixers=(kind,)), seed=0).to(device)
    tokens = torch.randint(256, (2, LENGTHS[device][-1] // 4), generator=torch.Generator().manual_seed(0)).to(device)
    return own, tokens


def digest(call: Call, device: str) -> list[str]:
    """Returns hashes of the bits of each result, VARIES for one that differs from call to call, and on a GPU of the
    launches."""
    found = [a if a == b else VARIES for a, b in zip(map(bits, call()), map(bits, call()), strict=True)]
    return found + ([hashed("\n".join(launches(call)).encode())] if device == "cuda" else [])


def differ(base: Sequence[str], own: Sequence[str]) -> bool:
    """Returns whether two digests of a call differ.

    A result that varies in one version, as a sum by atomic additions does, does not count.
    """
    return len(base) != len(own) or any(a != b and VARIES not in (a, b) for a, b in zip(base, own, strict=True))


def bits(x: Tensor) -> str:
    """Returns the hash of the shape, the dtype and the bits of a tensor."""
    values = x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    return hashed(f"{x.shape} {x.dtype}".encode() + values)


def hashed(content: bytes) -> str:
    """Returns 16 hex digits of a hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def launches(call: Call) -> list[str]:
    """Returns the kernels of a call, as the profiler of PyTorch records them.

    They are sorted, because the order of kernels on several streams varies.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [x for x in events if x.get("cat") == "kernel"]
    return sorted(str([x["name"], *(x["args"][y] for y in ("grid", "block", "shared memory"))]) for x in kernels)


def answer(device: str, first: int, workers: int) -> None:
    """Prints the name and the digest of each call of one of some workers."""
    torch.set_num_threads(1)
    for name, call in islice(calls(device), first, None, workers):
        print(json.dumps([name, digest(call, device)]), flush=True)


def digests(folder: Path, device: str, workers: int) -> dict[str, list[str]]:
    """Returns the digests of the version in a folder, by call; RuntimeError if one of its calls fails."""
    with tempfile.TemporaryDirectory() as package:
        (Path(package) / "sympow").symlink_to(folder / "sympow")
        paths = (package, str(HERE), os.environ.get("PYTHONPATH", ""))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        commands = [[sys.executable, __file__, "--answer", device, str(n), str(workers)] for n in range(workers)]
        own = [subprocess.Popen(x, stdout=subprocess.PIPE, text=True, env=environment) for x in commands]
        texts = [process.communicate()[0] for process in own]
    print(f"{folder}: {sum(text.count(chr(10)) for text in texts)} calls", flush=True)
    if any(process.returncode for process in own):
        raise RuntimeError(f"a call of {folder} failed")
    return dict(json.loads(line) for text in texts for line in text.splitlines())


@refuses
def main() -> int:
    from sympow.cli.options import positive

    parser = argparse.ArgumentParser(prog="python -m benchmarks.same", description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="folder with the files of the other version")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--workers", type=positive, default=1, help="processes of each version (default: 1)")
    parser.add_argument("--csv", type=Path, default=SAME, help="(default: the committed file)")
    args = parser.parse_args()
    if not (args.base / "sympow/ops").is_dir():
        parser.error(f"--base: expected the folder of a version of sympow; got {args.base}")
    base, own = (digests(folder.resolve(), args.device, args.workers) for folder in (args.base, HERE))
    different = [name for name in own if differ(base[name], own[name])]
    for name in different:
        print(f"differs: {name}")
    files = {path.relative_to(args.base).as_posix(): path.read_text() for path in args.base.glob("sympow/**/*.py")}
    generations = sum(name.startswith(GENERATION) for name in different)
    row = {"device": args.device, "calls": len(own), "different": len(different) - generations}
    row |= {"base": commit(args.base), "generations_different": generations}
    row |= {"base_code": hash_of_files(PARTS[args.device], files), **measured(args.device)}
    write(args.csv, [*known(args.csv), row])
    print(f"{len(own)} calls, {len(different)} differ, {generations} of them generate")
    return int(len(different) > generations)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
