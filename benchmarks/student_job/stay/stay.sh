# stay.sh until SECONDS [NAME FIRST LAST]: the only command of a stay. Keeps what came with this call, starts each job once
# its files are there, waits until SECONDS after the first call, then brings the small files, and parts FIRST..LAST of NAME.
T=$2; NAME=$3; FIRST=$4; LAST=$5
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
END=${END:-1690}
started alone || setsid nohup bash /tmp/gpu/alone.sh >/dev/null 2>&1 &
if (cd /tmp/student/parts && [ -e SHA256SUMS ] && awk '{print $2}' SHA256SUMS | xargs ls >/dev/null 2>&1); then
  started students || setsid nohup bash /tmp/gpu/students.sh $END > $O/students.out 2>&1 &
fi
busy() { [ $(now) -lt 150 ] || pgrep -f "[j]ob.py|[a]lone.sh" >/dev/null; }
while [ $(now) -lt $T ] && busy; do sleep 1; done
echo "$(now) s"; tail -n 12 $O/log.txt; tail -qn 2 $O/*/job.log | cut -c1-220; tail -qn 1 $O/*/run-*.txt | tr '\r' '\n' | tail -n 4 | cut -c1-160
nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader | tr "\n" " "
(cd $O && find . -type f -size -400k -not -path '*checkpoints*' -print0 | tar czf /tmp/small.tgz --null -T -)
[ -n "$OUT" ] && { cp /tmp/small.tgz $OUT/ 2>/dev/null; [ -n "$FIRST" ] && for n in $(seq -f %02g $FIRST $LAST); do cp /tmp/weights/$NAME.$n $OUT/ 2>/dev/null; done; ls $OUT; }
ls /tmp/weights 2>/dev/null | wc -l
