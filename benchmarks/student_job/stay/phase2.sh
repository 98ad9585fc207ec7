# phase2.sh: once the runs of issue 55 have ended, the rest of the repeats four at once, then the timed ones alone
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=1
B=$(cat /tmp/began); t() { echo $(( $(date +%s) - B )); }
SID=$(pgrep -of "[l]earn.sh 1")
while [ $(t) -lt ${LATEST:-1080} ]; do
  grep -q "long_heads end" $O/log.txt && grep -q "hybrid end" $O/log.txt && grep -q "prose 3 end" $O/log.txt && break; sleep 1; done
stamp "phase 2"; pkill -9 -s $SID; sleep 1
J=/tmp/gpu/repeat/jobs2.txt
python3 - $J <<'P'
import re, sys
done = {int(m[1]) for m in re.finditer(r"^jobs (\d+) gpu .* rc 0:", open("/tmp/out/repeat/log.txt").read(), re.M)}
out, n, head = [], 0, []
for line in open("/tmp/gpu/repeat/jobs.txt"):
    if line.startswith("#") or not line.strip(): out.append(line); continue
    n += 1
    if n not in done: out.append(line)
open(sys.argv[1], "w").writelines(out)
P
(cd $R; JOBS=$J bash /tmp/gpu/repeat/run.sh /tmp/out 4 $(( B + ${STOP:-1320} )) > $O/l_repeat2.log 2>&1); stamp "repeats end"
(cd $R; JOBS=jobs_alone.txt bash /tmp/gpu/repeat/run.sh /tmp/out 1 $(( B + 1660 )) > $O/l_alone.log 2>&1); stamp "alone end"
