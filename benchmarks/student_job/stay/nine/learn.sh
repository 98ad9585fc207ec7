# learn.sh END: rows of 65,536 tokens on GPU 0, beside the tests: two trainings at a time
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; wait_file /tmp/host_done; touch /tmp/kernel_ready
wait_file /tmp/timed_done
step $(left $1) far python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/far.runs --workers 2 --minutes $(minutes $1) --compile --measures --keep /tmp/keep --names softmax_gate:65536:0.008:2:100139008:muon,power_delta:65536:0.008:2:100139008:muon
touch /tmp/learn_done
