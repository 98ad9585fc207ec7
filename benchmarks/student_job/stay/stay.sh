# stay.sh until SECONDS [FIRST LAST]: the only command of a stay. Keeps what came with this call, starts each job once its
# files are there, waits until SECONDS after the first call, then brings the small files, and parts FIRST..LAST of weights.
T=$2; FIRST=$3; LAST=$4
[ -e /tmp/began ] || date +%s > /tmp/began
now() { echo $(( $(date +%s) - $(cat /tmp/began) )); }
mkdir -p /tmp/out /tmp/pkgs /tmp/corpus /tmp/student/parts /tmp/gpu
cp -rf .gpu/. /tmp/gpu/
if [ ! -e /tmp/repo ]; then mkdir /tmp/repo.new; cp -r benchmarks sympow tests docs scripts pyproject.toml README.md CONTRIBUTING.md CHANGELOG.md /tmp/repo.new/; mv /tmp/repo.new /tmp/repo; fi
if [ -e .whl ] && [ ! -e /tmp/pkgs/zarr ]; then for w in .whl/*.whl .gpu/serving/*.whl; do python3 -m zipfile -e $w /tmp/pkgs; done; fi
[ -e .corpus ] && cp -rf .corpus/. /tmp/corpus/
for d in .student/*; do [ -e $d ] && cp -rf $d/. /tmp/student/parts/; done
. /tmp/gpu/env.sh
pgrep -f "[c]ollect.sh" >/dev/null || setsid nohup bash /tmp/gpu/collect.sh >/dev/null 2>&1 &
started() { [ -e /tmp/started_$1 ] && return 0; touch /tmp/started_$1; stamp "start $1"; return 1; }
END=${END:-1655}; SEND=${SEND:-1230}; GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
started tests || (setsid nohup bash -c ". /tmp/gpu/env.sh; step 60 mqar_check python3 /tmp/gpu/mqar_check.py; step 200 t_graphs python3 -m pytest -q -n 4 -p no:cacheprovider tests/models/test_slots.py tests/models/test_generation.py tests/integrations/test_transformers_graphs.py tests/ops/triton/test_delta_step.py" >/dev/null 2>&1 &)
if ls /tmp/student/parts/SHA256SUMS /tmp/student/parts/w.03 >/dev/null 2>&1 && (cd /tmp/student/parts && awk '{print $2}' SHA256SUMS | xargs ls >/dev/null 2>&1); then
  started student || { bash /tmp/gpu/student.sh $SEND 0; setsid nohup bash /tmp/gpu/weights.sh >/dev/null 2>&1 & }
fi
if [ -e /tmp/corpus/train.zarr/.zarray ]; then started next || (setsid nohup bash /tmp/gpu/next.sh $END $GPUS $SEND > $O/next.out 2>&1 &); fi
# What was sent must work before anything waits for it: a damaged start ends every call at once, and the machine goes back.
if [ -e /tmp/corpus/train.zarr/.zarray ] && ! python3 -c "import zarr, gguf; zarr.open_array('/tmp/corpus/train.zarr', mode='r')[0]" 2>/tmp/broken; then touch /tmp/alldone; cat /tmp/broken; fi
busy() { [ $(now) -lt 150 ] || pgrep -f "[n]ext.sh|[j]ob.py|-m [b]enchmarks|[r]un.sh" >/dev/null; }
while [ $(now) -lt $T ] && [ ! -e /tmp/alldone ] && busy; do sleep 1; done
echo "$(now) s"; tail -n 14 $O/log.txt; tail -qn 3 $O/student*/job.log | cut -c1-220; tail -qn 1 $O/student*/run-*.txt | tr '\r' '\n' | tail -n 4 | cut -c1-160
tail -qn 1 $O/l_*.log | cut -c1-160
# The archive of collect.sh is up to 20 seconds old: rows of the last program were lost so. Pack anew before leaving.
(cd $O && find . -type f -size -400k -not -path '*.runs/*' -not -path '*/jobs/*' -not -path '*checkpoints*' -print0 | tar czf /tmp/small.tgz --null -T -)
[ -n "$OUT" ] && { cp /tmp/small.tgz $OUT/ 2>/dev/null; [ -n "$FIRST" ] && for n in $(seq -f %02g $FIRST $LAST); do cp /tmp/weights/C.$n $OUT/ 2>/dev/null; done; ls $OUT; }
ls /tmp/weights 2>/dev/null | wc -l
