import lzma, zarr, numpy as np
a = zarr.open_array("/work/prep/k/kernel/heldout.zarr", mode="r"); print(a.shape)
F=[{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]
data = np.asarray(a[:240], dtype="<u2").tobytes()
x = lzma.compress(data, format=lzma.FORMAT_XZ, filters=F); open("/work/main/.student/c/full_heldout.xz","wb").write(x); print(len(x)/1e6)
