"""The 240 held-out rows of the whole corpus as an array in /tmp/full"""
import json, lzma, sys
from pathlib import Path
import numpy as np
rows = np.frombuffer(lzma.decompress(Path(sys.argv[1]).read_bytes()), "<u2").reshape(-1, 65536)
array = Path(sys.argv[2]) / "heldout.zarr"; array.mkdir(parents=True, exist_ok=True)
for n, row in enumerate(rows): (array / f"{n}.0").write_bytes(row.tobytes())
(array / ".zarray").write_text(json.dumps({"zarr_format": 2, "shape": list(rows.shape), "chunks": [1, 65536], "dtype": "<u2", "compressor": None, "fill_value": 0, "order": "C", "filters": None}))
print(rows.shape)
