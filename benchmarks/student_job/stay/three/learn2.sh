# learn2.sh END: GPU 0: the delta rule with an offset, 300 million tokens
. /tmp/gpu/env.sh
wait_file /tmp/kernel_ready; wait_file /tmp/timed_done
export CUDA_VISIBLE_DEVICES=0
D=power_delta+offset=0.09 L=4096:0.008
step $(left $1) learning2 python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning2.runs --workers 2 --minutes $(minutes $1) --compile --names $D+beta=0.5:$L:0:300417024:muon,$D:$L:1:300417024:muon,$D:$L:2:300417024:muon
