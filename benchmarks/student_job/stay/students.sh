# students.sh END: unpacks, prepares, trains the students d and h at once (and p, if P is set, once h is trained)
. /tmp/gpu/env.sh
END=$1; left() { echo $(( END - ($(date +%s) - $(cat /tmp/began)) )); }
python3 /tmp/gpu/unpack.py /tmp/student/parts /tmp/student/data > $O/unpack.log 2>&1; tail -2 $O/unpack.log
export SHARED=/tmp/student/work WINDOW=1024 PYTHONPATH=/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache_student TORCHINDUCTOR_CACHE_DIR=/tmp/icache_student
export TORCHINDUCTOR_COMPILE_THREADS=5
mkdir -p $SHARED
job() { mkdir -p $O/$1; REST=$2 setsid nohup bash /tmp/gpu/job.sh /tmp/repo /tmp/student/data $O/$1 0 $(left) $1 > $O/$1/out.txt 2>&1 & }
weights() { PYTHONPATH=/tmp/repo:/tmp/pkgs CUDA_VISIBLE_DEVICES= python3 /tmp/gpu/weights.py $1 $2 >> $O/weights.log 2>&1; stamp "weights $2"; }
(while true; do echo "$(( $(date +%s) - $(cat /tmp/began) )) $(nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader)" >> $O/gpu.txt; sleep 10; done) &
job prep 0; job d 175; job h 330
while [ ! -e $SHARED/trained-h ] && [ $(left) -gt 200 ]; do sleep 1; done
stamp "h trained"; [ -n "$P" ] && job p 75
weights $SHARED/h/run-C h
while [ ! -e $SHARED/trained-d ] && [ $(left) -gt 60 ]; do sleep 1; done; stamp "d trained"
[ -e $SHARED/d/run-E/metrics.jsonl ] && weights $SHARED/d/run-E d || weights $SHARED/d/run-C d
