# students.sh END: unpacks, prepares and trains the students; on one GPU d and h, on two d and n beside h, w and p
. /tmp/gpu/env.sh
END=$1; left() { echo $(( END - ($(date +%s) - $(cat /tmp/began)) )); }
python3 /tmp/gpu/unpack.py /tmp/student/parts /tmp/student/data > $O/unpack.log 2>&1; tail -2 $O/unpack.log
export SHARED=/tmp/student/work WINDOW=1024 PYTHONPATH=/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache_student TORCHINDUCTOR_CACHE_DIR=/tmp/icache_student
export TORCHINDUCTOR_COMPILE_THREADS=5 STUDENTS="d h"; [ $GPUS -gt 1 ] && STUDENTS="d h n w p"
mkdir -p $SHARED
# job NAME SECONDS_FOR_MEASURES GPU
job() { mkdir -p $O/$1; REST=$2 setsid nohup bash /tmp/gpu/job.sh /tmp/repo /tmp/student/data $O/$1 $3 $(left) $1 > $O/$1/out.txt 2>&1 & }
weights() { PYTHONPATH=/tmp/repo:/tmp/pkgs CUDA_VISIBLE_DEVICES= python3 /tmp/gpu/weights.py $1 $2 >> $O/weights.log 2>&1; stamp "weights $2"; }
(while true; do echo "$(( $(date +%s) - $(cat /tmp/began) )) $(nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader | tr '\n' ' ')" >> $O/gpu.txt; sleep 10; done) &
if [ $GPUS -gt 1 ]; then job prep 0 0; job d 230 0; job n 200 0; job h 330 1; job w 330 1; job p 95 1
else job prep 0 0; job d 175 0; job h 330 0; fi
while [ ! -e $SHARED/trained-h ] && [ $(left) -gt 200 ]; do sleep 1; done
stamp "h trained"
weights $SHARED/h/run-C h
while [ ! -e $SHARED/trained-d ] && [ $(left) -gt 60 ]; do sleep 1; done; stamp "d trained"
weights $SHARED/d/run-C d
