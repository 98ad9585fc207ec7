# student.sh END GPU [GPU2]: unpacks and starts the student, and on another GPU the control with p = 1
. /tmp/gpu/env.sh
cd /tmp/student/parts && cp job.sh job.py unpack.py .. && python3 unpack.py /tmp/student/parts /tmp/student/data > $O/unpack.log 2>&1; tail -2 $O/unpack.log
LEFT=$(( $1 - ($(date +%s) - $(cat /tmp/began)) ))
cd /tmp; export WINDOW=1024 FINAL=260
start() { # name gpu
  WORK=/tmp/$1/work TRITON_CACHE_DIR=/tmp/tcache_$1 TORCHINDUCTOR_CACHE_DIR=/tmp/icache_$1 PYTHONPATH=/tmp/pkgs \
    setsid nohup bash /tmp/student/job.sh /tmp/repo /tmp/student/data $O/$1 $2 $LEFT > $O/$1.out 2>&1 &
}
mkdir -p /tmp/student1
start student $2
[ -n "$3" ] && P=1 start student1 $3
sleep 2; cat $O/student*.out
