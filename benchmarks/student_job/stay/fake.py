"""fake.py FOLDER CONFIGS: small models with random weights, whose layers are those of the students, and random rows, so that kernels
and graphs are compiled while the real files are still on their way."""
import json, sys, dataclasses
from pathlib import Path
import numpy as np
from sympow.models import LanguageModel
from sympow.training.run_folder import write_run_folder
from sympow.training.config import RunConfig
out, configs = Path(sys.argv[1]), Path(sys.argv[2])
tokenizer = (configs / "tokenizer.json").read_text()
for name, layers in (("teacher", (0, 0, 0)), ("student", (0, 1, 5))):  # window, gated softmax, delta rule
    given = json.loads((configs / f"{name}.json").read_text())
    mixers = given["model"]["mixers"]
    given["model"] |= {"n_layers": 3, "mixers": [mixers[i if len(mixers) > 1 else 0] for i in layers]}
    for mixer in given["model"]["mixers"]:
        if "window" in mixer["options"] and len(sys.argv) > 3:
            mixer["options"]["window"] = int(sys.argv[3])
    print(name, [m["name"] for m in given["model"]["mixers"]])
    config = RunConfig.from_dict(given)
    write_run_folder(out / name, config, LanguageModel(config.model, seed=0), tokenizer=tokenizer)
docs = out / "docs"; docs.mkdir()
for split, count in (("train", 8), ("heldout", 4)):
    array = docs / f"{split}.zarr"; array.mkdir()
    rows = np.random.default_rng(0).integers(1000, 40000, (count, 65536)).astype("<u2")
    (array / ".zarray").write_text(json.dumps({"zarr_format": 2, "shape": list(rows.shape), "chunks": [1, 65536], "dtype": "<u2", "compressor": None, "fill_value": 0, "order": "C", "filters": None}))
    for n, row in enumerate(rows): (array / f"{n}.0").write_bytes(row.tobytes())
(docs / "tokenizer.json").write_text(tokenizer)
