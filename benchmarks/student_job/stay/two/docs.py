"""docs.py DATA OUT: the prose corpus from DATA/{train,heldout}.u16 as arrays"""
import json, sys
from pathlib import Path
import numpy as np
data, docs = map(Path, sys.argv[1:3])
docs.mkdir(parents=True, exist_ok=True)
for split in ("train", "heldout"):
    rows = np.fromfile(data / f"{split}.u16", "<u2").reshape(-1, 65536)
    array = docs / f"{split}.zarr"; array.mkdir(exist_ok=True)
    (array / ".zarray").write_text(json.dumps({"zarr_format": 2, "shape": list(rows.shape), "chunks": [1, 65536], "dtype": "<u2", "compressor": None, "fill_value": 0, "order": "C", "filters": None}))
    for n, row in enumerate(rows): (array / f"{n}.0").write_bytes(row.tobytes())
    print(split, rows.shape)
(docs / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
(docs / "ready").touch()
