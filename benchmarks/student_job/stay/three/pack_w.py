"""Packs the bf16 weights: low bytes raw, high bytes by xz; parts of at most 48 MB."""
import glob, lzma, sys, numpy as np
from pathlib import Path
name = sys.argv[1]
data = np.frombuffer(b"".join(Path(p).read_bytes() for p in sorted(glob.glob(f"/work/got/w/{name}.*"))), np.uint8)
head = int(np.frombuffer(data[:8].tobytes(), "<u8")[0]) + 8
body = data[head:]; assert len(body) % 2 == 0
low, high = body[0::2].tobytes(), body[1::2].tobytes()
filters = [{"id": lzma.FILTER_LZMA2, "preset": 3, "lc": 0, "lp": 0, "pb": 0}]
from concurrent.futures import ThreadPoolExecutor
n = 4; step = -(-len(high) // n)
with ThreadPoolExecutor(2) as pool:
    packed = list(pool.map(lambda i: lzma.compress(high[i*step:(i+1)*step], format=lzma.FORMAT_XZ, filters=filters), range(n)))
blob = np.array([head, len(low), n, *map(len, packed)], "<u8").tobytes() + data[:head].tobytes() + low + b"".join(packed)
print(name, len(data)/1e6, len(blob)/1e6, [len(p)/1e6 for p in packed])
size = 47_000_000
for i in range(-(-len(blob)//size)):
    d = Path(f"/work/main/.student/{name}{i}"); d.mkdir(parents=True, exist_ok=True)
    (d / f"{name}w.{i:02d}").write_bytes(blob[i*size:(i+1)*size])
last = -(-len(blob)//size)
import hashlib
(Path(f"/work/main/.student/{name}{last-1}") / f"{name.upper()}_SUMS").write_text("".join(f"{hashlib.sha256(blob[i*size:(i+1)*size]).hexdigest()} {name}w.{i:02d}\n" for i in range(last)))
