import sys, glob, torch
from pathlib import Path
from safetensors.torch import load
sys.path.insert(0, "/work/main")
from sympow.training import load as load_run
from sympow.training.run_folder import write_run_folder
name = sys.argv[1]
data = b"".join(Path(p).read_bytes() for p in sorted(glob.glob(f"/work/got/w/{name}.*")))
weights = load(data)
run = load_run(f"/work/students/{name}-swapped")
run.model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in weights.items()})
write_run_folder(f"/work/students/{name}", run.config, run.model, tokenizer=Path("/work/stay/fake/tokenizer.json").read_text())
