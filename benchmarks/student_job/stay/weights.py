"""weights.py RUN NAME: the last weights of a run in bfloat16, as parts of 15 MiB in /tmp/weights"""
import sys, pathlib, torch
from safetensors.torch import save
from sympow.training import load_model
run, name = sys.argv[1:3]
model = load_model(run).model
data = save({k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in model.state_dict().items()})
out = pathlib.Path("/tmp/weights"); out.mkdir(exist_ok=True)
size = 15 << 20
for n in range(-(-len(data) // size)):
    (out / f"{name}.{n:02d}").write_bytes(data[n * size:(n + 1) * size])
print(len(data) / 2**20, "MiB")
