# weights.sh: writes the weights of C, then of B, as parts when the student's last phase has ended
. /tmp/gpu/env.sh
while ! grep -q "C: [0-9,]* tokens" $O/student/job.log 2>/dev/null; do sleep 2; done
sleep 3; for n in C B; do CUDA_VISIBLE_DEVICES= python3 /tmp/gpu/weights.py /tmp/student/work/run-$n $n >> $O/weights.log 2>&1; stamp "weights $n"; done
