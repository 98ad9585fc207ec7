# student.sh END GPU: unpacks and starts the student
. /tmp/gpu/env.sh
cp /tmp/gpu/job.sh /tmp/gpu/job.py /tmp/gpu/unpack.py /tmp/student/ && cd /tmp/student && python3 unpack.py /tmp/student/parts /tmp/student/data > $O/unpack.log 2>&1; tail -2 $O/unpack.log
if [ -e /tmp/student/parts/w.03 ]; then
  python3 /tmp/gpu/join.py > $O/start.log 2>&1; tail -1 $O/start.log
  [ -e /tmp/student/start.safetensors ] && export START=/tmp/student/start.safetensors
fi
LEFT=$(( $1 - ($(date +%s) - $(cat /tmp/began)) ))
cd /tmp; export WINDOW=1024 FINAL=380
D=window,delta G=window,gated
export PATTERN=$G,$G,$D,$D,$D,$D,$G,$D,$G,$G,$D,$D,$D,$D,$D
WORK=/tmp/student/work TRITON_CACHE_DIR=/tmp/tcache_student TORCHINDUCTOR_CACHE_DIR=/tmp/icache_student PYTHONPATH=/tmp/pkgs \
  setsid nohup bash /tmp/student/job.sh /tmp/repo /tmp/student/data $O/student $2 $LEFT > $O/student.out 2>&1 &
sleep 2; cat $O/student.out
