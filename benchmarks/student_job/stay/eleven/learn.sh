. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel
wait_file /tmp/timed_done
step 300 far python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/far.runs --workers 1 --minutes 5 --compile --keep /tmp/keep --names power:4096:0.008:0:100139008:muon
find /tmp/keep -maxdepth 2 | head -20 > $O/keep.txt
step 200 state_dtype python3 -m benchmarks.state_dtype $(find /tmp/keep -mindepth 1 -maxdepth 1 -type d | head -1) --device cuda --csv $O/state_dtype_gpu.csv
touch /tmp/learn_done
