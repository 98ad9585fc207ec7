"""Packs the data of the job into parts: python pack.py ROWS."""
import hashlib, io, json, lzma, sys, tarfile
from pathlib import Path
import numpy as np, zarr
here = Path(".")
rows = int(sys.argv[1])
stage = here / "stage"; stage.mkdir(exist_ok=True)
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28, "lc": 3, "lp": 1, "pb": 1}]
def tokens(split, count, name):
    a = zarr.open_array(here / "docs" / f"{split}.zarr", mode="r")
    chosen = np.linspace(0, a.shape[0] - 1, min(count, a.shape[0])).astype(np.int64)
    data = np.concatenate([np.asarray(a[int(i)], dtype="<u2") for i in chosen])
    packed = lzma.compress(data.tobytes(), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=FILTERS)
    (stage / f"{name}.u16.xz").write_bytes(packed)
    print(name, len(chosen), "of", a.shape[0], "rows,", data.size, "tokens,", len(packed) / 1e6, "MB", len(packed) / data.size, flush=True)
tokens("heldout", 64, "heldout")
tokens("train", rows, "train")
gguf = stage / "SmolLM2-135M-Instruct.Q4_1.gguf.xz"
if not gguf.exists():
    gguf.write_bytes(lzma.compress((here / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes(), preset=9 | lzma.PRESET_EXTREME))
out = io.BytesIO()
with tarfile.open(fileobj=out, mode="w") as tar:
    for file in sorted(stage.glob("*.xz")): tar.add(file, file.name)
    tar.add(here / "docs" / "tokenizer.json", "tokenizer.json")
    for file in sorted((here / "whl").glob("*.whl")): tar.add(file, f"whl/{file.name}")
whole = out.getvalue()
parts = here / "parts"; parts.mkdir(exist_ok=True)
for old in parts.glob("*"): old.unlink()
sums = []
SIZE = 22_000_000
for n in range(-(-len(whole) // SIZE)):
    piece = whole[n * SIZE : (n + 1) * SIZE]
    (parts / f"{n:02d}.part").write_bytes(piece)
    sums.append(f"{hashlib.sha256(piece).hexdigest()}  {n:02d}.part")
(parts / "SHA256SUMS").write_text("\n".join(sums) + "\n")
print(len(whole) / 1e6, "MB in", len(sums), "parts")
