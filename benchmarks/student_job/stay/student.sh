# student.sh GPU END: unpacks and starts the student
. /tmp/gpu/env.sh
cd /tmp/student/parts && cp job.sh job.py unpack.py .. && python3 unpack.py /tmp/student/parts /tmp/student/data > $O/unpack.log 2>&1; tail -2 $O/unpack.log
LEFT=$(( $2 - ($(date +%s) - $(cat /tmp/began)) ))
cd /tmp; export WINDOW=1024 FINAL=260 WORK=/tmp/student/work TRITON_CACHE_DIR=/tmp/tcache_student TORCHINDUCTOR_CACHE_DIR=/tmp/icache_student
PYTHONPATH=/tmp/pkgs setsid nohup bash /tmp/student/job.sh /tmp/repo /tmp/student/data $O/student $1 $LEFT > $O/student.out 2>&1 &
sleep 2; cat $O/student.out
