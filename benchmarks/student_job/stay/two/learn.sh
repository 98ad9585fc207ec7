. /tmp/gpu/env.sh
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; touch /tmp/kernel_ready
export CUDA_VISIBLE_DEVICES=1 OMP_NUM_THREADS=3
left=$(( $1 - ($(date +%s) - $(cat /tmp/began)) ))
stamp "begin learning"
python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning.runs --workers 1 --minutes $(python3 -c "print(round($left/60,2))") --compile --names power_delta+offset=0.09:4096:0.008:0:300417024:muon > $O/learning.log 2>&1
stamp "end learning"
