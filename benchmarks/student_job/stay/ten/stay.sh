# stay.sh until SECONDS: keeps what came with this call, starts each job once its files are there, waits until SECONDS after
# the first call, then brings the small files.
T=$2
[ -e /tmp/began ] || date +%s > /tmp/began
now() { echo $(( $(date +%s) - $(cat /tmp/began) )); }
mkdir -p /tmp/out /tmp/pkgs /tmp/student/parts /tmp/gpu
cp -rf .gpu/. /tmp/gpu/
if [ ! -e /tmp/repo ]; then mkdir /tmp/repo.new; cp -r benchmarks sympow tests docs scripts pyproject.toml README.md CONTRIBUTING.md CHANGELOG.md /tmp/repo.new/; mv /tmp/repo.new /tmp/repo; fi
if [ -e .whl ] && [ ! -e /tmp/pkgs/zarr ]; then for w in .whl/*.whl; do python3 -m zipfile -e $w /tmp/pkgs; done; fi
for d in .student/*; do [ -e $d ] && cp -rf $d/. /tmp/student/parts/; done
. /tmp/gpu/env.sh
pgrep -f "[c]ollect.sh" >/dev/null || setsid nohup bash /tmp/gpu/collect.sh >/dev/null 2>&1 &
started() { [ -e /tmp/started_$1 ] && return 0; touch /tmp/started_$1; stamp "start $1"; return 1; }
END=${END:-800}
has() { (cd /tmp/student/parts && [ -e $1 ] && awk '{print $2}' $1 | xargs ls >/dev/null 2>&1); }
started timed || setsid nohup bash /tmp/gpu/timed.sh > $O/timed.out 2>&1 &
started same || setsid nohup bash /tmp/gpu/same.sh > $O/same.out 2>&1 &
started tests || setsid nohup bash /tmp/gpu/tests.sh $END > $O/tests.out 2>&1 &



busy() { [ $(now) -lt 300 ] || pgrep -f "[t]imed.sh|[t]ests.sh" >/dev/null; }
while [ $(now) -lt $T ] && busy; do sleep 1; done
echo "$(now) s"; tail -n 14 $O/log.txt; tail -qn 2 $O/host.log $O/same.log $O/decoding.log $O/models.log $O/hf.log $O/brumby.log $O/serving.log $O/memcheck.log $O/tests.log 2>/dev/null | tr '\r' '\n' | tail -n 24 | cut -c1-200
nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader | tr "\n" " "; free -g | awk 'NR==2 {print $3 " GB"}'
[ -e /tmp/tested/build/gpu_passed_tests.csv ] && gzip -c /tmp/tested/build/gpu_passed_tests.csv > $O/gpu_passed_tests.csv.gz
(cd $O && find . -type f -size -400k -not -path '*checkpoints*' -print0 | tar czf /tmp/small.tgz --null -T -)
cp /tmp/small.tgz $OUT/
