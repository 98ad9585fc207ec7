"""build.py NAME: the run folder /tmp/students/LABEL of the parts of a student's weights."""
import lzma, sys, torch, numpy as np
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from safetensors.torch import load
from sympow.models import LanguageModel
from sympow.training.run_folder import read_config, write_run_folder
name, label, parts, out = sys.argv[1:5]
blob = b"".join(p.read_bytes() for p in sorted(Path(parts).glob(f"{name}w.*")))
head, count, n = np.frombuffer(blob[:24], "<u8").tolist()
sizes = np.frombuffer(blob[24:24 + 8 * n], "<u8").tolist()
at = 24 + 8 * n
header, low = blob[at:at + head], blob[at + head:at + head + count]
at += head + count
pieces = []
for size in sizes:
    pieces.append(blob[at:at + size]); at += size
with ThreadPoolExecutor(n) as pool:
    high = b"".join(pool.map(lzma.decompress, pieces))
body = np.empty(2 * count, np.uint8)
body[0::2], body[1::2] = np.frombuffer(low, np.uint8), np.frombuffer(high, np.uint8)
weights = load(header + body.tobytes())
own = Path(__file__).with_name(name)
config = read_config(own)
model = LanguageModel(config.model, seed=0)
model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in weights.items()})
write_run_folder(f"{out}/{label}", config, model, tokenizer=(own.parent / "tokenizer.json").read_text())
print("built", label)
