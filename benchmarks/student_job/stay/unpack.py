"""unpack.py PARTS DATA: checks the parts, joins and unpacks them into DATA. PARTS may be several folders, by commas."""
import hashlib, io, lzma, sys, tarfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
began = time.time()
folders, data = [Path(f) for f in sys.argv[1].split(",")], Path(sys.argv[2])
data.mkdir(parents=True, exist_ok=True)
found = {p.name: p for f in folders for p in f.glob("*.part")}
sums = next(f / "SHA256SUMS" for f in folders if (f / "SHA256SUMS").exists()).read_text().split("\n")
whole = b""
for line in filter(None, sums):
    want, name = line.split()
    piece = found[name].read_bytes()
    if hashlib.sha256(piece).hexdigest() != want:
        sys.exit(f"{name} is damaged")
    whole += piece
with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
    tar.extractall(data, filter="data")
def expand(file):
    target = file.with_suffix("")
    target.write_bytes(lzma.decompress(file.read_bytes()))
    file.unlink()
    return target.name, target.stat().st_size
with ThreadPoolExecutor() as pool:
    for name, size in pool.map(expand, sorted(data.glob("*.xz"))):
        print(name, size)
print(f"unpacked into {data} in {time.time() - began:.1f} s")
