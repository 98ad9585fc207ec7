# setup2.sh: wheels, and the files of the student that came with this call
[ -e .whl ] && for w in .whl/*.whl; do python3 -m zipfile -e $w /tmp/pkgs; done
mkdir -p /tmp/student/parts /tmp/prose
[ -e .prose ] && cp -r .prose/* /tmp/prose/
for d in .student/*; do [ -e $d ] && cp -r $d/* /tmp/student/parts/; done
ls /tmp/student/parts | tr '\n' ' '
. /tmp/gpu/env.sh
python3 -c "import zarr, numcodecs, torch; print(zarr.__version__, torch.cuda.device_count())"
