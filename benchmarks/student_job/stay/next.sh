# next.sh END GPUS STUDENT_END: repetitions of committed rows beside the student, then what is timed, alone; results in
# /tmp/out/repeat (see repeat/README)
. /tmp/gpu/env.sh
END=$1; SEND=$3; began=$(cat /tmp/began); export CUDA_VISIBLE_DEVICES=0 CORPUS=/tmp/corpus
rest() { echo $(( END - ($(date +%s) - began) )); }
# beside the student's training; none once its measures begin
export TORCHINDUCTOR_COMPILE_THREADS=3
GRACE=20 bash /tmp/gpu/repeat/run.sh $O 3 $(( began + SEND - 315 ))
stamp "repeat end"
while pgrep -f "[j]ob.py" >/dev/null && [ $(( $(date +%s) - began )) -lt $SEND ]; do sleep 1; done
pkill -f "[s]ympow.cli passkey" ; pkill -f "[s]ympow.cli needles"
stamp "alone begin"; export TORCHINDUCTOR_COMPILE_THREADS=12
step $(rest) speed5 python3 -m benchmarks.context_scaling speed --variants softmax_gate,hybrid_heads_delta,window,power_delta,power --contexts 4096,65536 --modes compiled --csv $O/speed.csv
step $(rest) decoding python3 -m benchmarks.conversion_decoding --device cuda --contexts 32768 131072 --csv $O/conversion_decoding.csv
step $(rest) speed8 python3 -m benchmarks.context_scaling speed --variants hybrid_delta_gate,heads_delta,hybrid_power_gate --contexts 4096,65536 --modes compiled --csv $O/speed8.csv
step $(rest) delta_steps python3 -m benchmarks.delta_steps --device cuda --csv $O/delta_steps_gpu.csv
step $(rest) delta python3 -m benchmarks.delta --device cuda --times 65536 --csv $O/delta_gpu.csv
JOBS=jobs_alone.txt GRACE=0 bash /tmp/gpu/repeat/run.sh $O 1 $(( began + END ))
# time that is left: losses whose job had no time before
GRACE=0 JOBS=/tmp/gpu/repeat/jobs_again.txt
python3 - <<'P' > $JOBS
import re, pathlib
lines = [l for l in pathlib.Path("/tmp/gpu/repeat/jobs.txt").read_text().splitlines() if l and not l.startswith("#")]
log = pathlib.Path("/tmp/out/repeat/log.txt").read_text()
done = {int(n) for n in re.findall(r"^jobs (\d+) gpu .* rc 0", log, re.M)}
heads = pathlib.Path("/tmp/gpu/repeat/jobs.txt").read_text().splitlines()
print(*[l for n, l in enumerate(lines, 1) if n not in done], sep="\n")
P
export GRACE JOBS; bash /tmp/gpu/repeat/run.sh $O 4 $(( began + END ))
stamp "next end"
