# next.sh END GPUS STUDENT_END: losses beside the student, then what is timed, alone; results in /tmp/out (see repeat/README)
. /tmp/gpu/env.sh
END=$1; SEND=$3; began=$(cat /tmp/began); export CUDA_VISIBLE_DEVICES=0 CORPUS=/tmp/corpus
rest() { echo $(( END - ($(date +%s) - began) )); }
export TORCHINDUCTOR_COMPILE_THREADS=3
GRACE=10 LIMIT=1000 bash /tmp/gpu/repeat/run.sh $O 3 $(( began + SEND - 385 ))
stamp "repeat end"
while pgrep -f "[j]ob.py" >/dev/null && [ $(( $(date +%s) - began )) -lt $SEND ]; do sleep 1; done
pkill -f "[s]ympow.cli passkey" ; pkill -f "[s]ympow.cli needles"
stamp "alone begin"; export TORCHINDUCTOR_COMPILE_THREADS=12
step $(rest) decoding python3 -m benchmarks.conversion_decoding --device cuda --contexts 131072 --csv $O/conversion_decoding.csv
step $(rest) speed python3 -m benchmarks.context_scaling speed --variants power,window --contexts 4096 --modes compiled --csv $O/speed.csv
JOBS=jobs_alone.txt GRACE=0 bash /tmp/gpu/repeat/run.sh $O 1 $(( began + END ))
step $(rest) host python3 -m benchmarks.host --device cuda --csv $O/host.csv
step $(rest) delta python3 -m benchmarks.delta --device cuda --times 65536 --csv $O/delta_gpu.csv
stamp "next end"
