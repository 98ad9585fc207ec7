# learn.sh END: rows of 65,536 tokens (seeds 1 and 2), RWKV-7 in its body at 65,536
. /tmp/gpu/env.sh
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; wait_file /tmp/timed_done; touch /tmp/kernel_ready
names=body_rwkv7:65536:0.008:0:30146560:muon; for seed in 1 2; do for v in power_delta softmax_gate; do names=$names,$v:65536:0.008:$seed:100139008:muon; done; done
step $(left $1) far python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/far.runs --workers 2 --minutes $(minutes $1) --compile --measures --keep /tmp/keep --names $names,hybrid_heads_delta:65536:0.008:1:100139008:muon
touch /tmp/learn_done
