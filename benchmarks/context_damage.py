"""Measures what happens to context files whose writer is killed, and to damaged files: `python -m
benchmarks.context_damage`.

A process writes one file again and again, with one of two contexts each time, and is killed by SIGKILL at a random
moment. The file is then loaded, and must be one of the two contexts. Then a file is damaged in fifty ways. Each damaged
file must be refused with one line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.common.measure import csv_file, keep, measured
from sympow.models import Context, ContextError, LanguageModel, ModelConfig, load_context, save_context

READ = 43  # tokens of the file that is damaged
WRITTEN = (10, 20)  # tokens of the two contexts that are written


def small_model() -> LanguageModel:
    """Returns an untrained model, the same in every process."""
    return LanguageModel(ModelConfig(61, 32, 2, 2), seed=0).eval()


def contexts(model: LanguageModel, *lengths: int) -> list[Context]:
    """Returns a context after so many tokens, for each length."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(model.config.vocab_size, (1, length), generator=generator) for length in lengths]
    return [Context.begin(model).read(model, tokens) for tokens in made]


def kill_writers(path: Path, kills: int) -> dict:
    """Returns the row for a number of killed writers of a file."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["torch", "sympow.models", "safetensors.torch"])
    model, draw, left = small_model(), random.Random(0), Counter[int]()
    for _ in range(kills):
        before = path.stat().st_mtime_ns if path.exists() else 0
        writer = forked.Process(target=_write_for_ever, args=(str(path),))
        writer.start()
        while writer.is_alive() and (not path.exists() or path.stat().st_mtime_ns == before):
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        writer.kill()
        writer.join()
        try:
            left[load_context(path, model).tokens] += 1
        except ContextError as error:
            print(error)
    return {
        "measure": "killed writers",
        "kills": kills,
        "whole_files": sum(left[tokens] for tokens in WRITTEN),
        "files_by_tokens_read": {str(tokens): left[tokens] for tokens in sorted(left)},
    }


def _write_for_ever(path: str) -> None:
    torch.set_num_threads(1)
    model = small_model()
    made = contexts(model, *WRITTEN)
    while True:
        for context in made:
            save_context(path, model, context)


def corruptions(whole: bytes) -> dict[str, bytes]:
    """Returns fifty ways to damage a file of READ tokens."""
    draw = random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    spoilt = {"empty": b"", "text": b"a text\n" * 100, "zeros": bytes(len(whole)), "longer": whole + b"\0"}
    for cut in (1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1):
        spoilt[f"cut at {cut}"] = whole[:cut]
    for i in range(4):
        spoilt[f"cut {i}"] = whole[: draw.randrange(header, len(whole))]
    for i in range(12):
        at, bit = draw.randrange(header), 1 << draw.randrange(8)
        spoilt[f"header bit {i}"] = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
    for i in range(14):
        at, bit = draw.randrange(header, len(whole)), 1 << draw.randrange(8)
        spoilt[f"data bit {i}"] = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
    for i in range(4):
        at = draw.randrange(header, len(whole) - 512)
        spoilt[f"hole {i}"] = whole[:at] + bytes(512) + whole[at + 512 :]
    spoilt["swapped halves"] = whole[len(whole) // 2 :] + whole[: len(whole) // 2]
    spoilt["tokens"] = whole.replace(b"%020d" % READ, b"%020d" % (READ - 1), 1)
    spoilt["two rows of bytes"] = whole[:-8] + whole[-4:] + whole[-8:-4]
    spoilt["long header"] = (1 << 40).to_bytes(8, "little") + whole[8:]
    return spoilt


def spoil(path: Path) -> dict:
    """Returns the row of the files that `corruptions` makes."""
    model, refused = small_model(), 0
    save_context(path, model, *contexts(model, READ))
    spoilt = corruptions(path.read_bytes())
    for name, content in spoilt.items():
        path.write_bytes(content)
        try:
            load_context(path, model)
            print(f"not refused: {name}")
        except ContextError as error:
            refused += "\n" not in str(error)
    return {"measure": "spoilt files", "files": len(spoilt), "refused": refused}


def main() -> None:
    """Reads the options, measures, and writes two rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_damage", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="writers that are killed (default: 100)")
    parser.add_argument("--csv", type=csv_file, required=True, help="file the rows are written to")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [kill_writers(Path(folder) / "x.ctx", chosen.kills), spoil(Path(folder) / "y.ctx")]
    keep(chosen.csv, [row | measured("cpu") for row in rows])


if __name__ == "__main__":
    main()
