# check.sh, in the root of a checkout, before a stay: what will be carried, in a Python like that of the GPU machine, which
# has numpy, packaging, typing_extensions, requests and tqdm, and none of the wheels' other needs.
set -e
[ -e /tmp/mimic ] || { ${PYTHON312:-python3.12} -m venv /tmp/mimic; /tmp/mimic/bin/pip install -q numpy==2.5.2 packaging typing_extensions tqdm requests; }
rm -rf /tmp/pkgs_check; mkdir /tmp/pkgs_check; for w in .whl/*.whl; do python3 -m zipfile -e $w /tmp/pkgs_check; done
PYTHONPATH=/tmp/pkgs_check /tmp/mimic/bin/python -c "
import zarr, numcodecs, gguf; a = zarr.open_array('.corpus/train.zarr', mode='r'); print(zarr.__version__, a.shape, a[0][:5])"
tree=$(git ls-files | xargs -d '\n' du -cb | tail -1 | cut -f1)
for c in .corpus .student/a .student/b .student/c; do [ -e $c ] && echo "$c: $(( (tree + $(du -sb $c .gpu .whl | awk '{n += $1} END {print n}')) / 1048576 )) MiB of 64"; done
for f in .gpu/*.sh; do bash -n $f; done; for f in .gpu/*.py; do python3 -m py_compile $f; done; echo fine
