# learn2.sh END: GPU 0: the delta rule with an offset, seed 2; the published forms at three rates; delta rule at 65,536 tokens
. /tmp/gpu/env.sh
wait_file /tmp/kernel_ready; wait_file /tmp/timed_done
export CUDA_VISIBLE_DEVICES=0
step $(left $1) learning2 python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning2.runs --workers 1 --minutes $(minutes $1) --compile --names power_delta+offset=0.09:4096:0.008:2:300417024:muon,power_delta:65536:0.008:1:100139008:muon --measures
step $(left $1) bodies python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/bodies.runs --workers 1 --minutes $(minutes $1) --compile --names body_rwkv7:65536:0.008:0:30146560:muon
