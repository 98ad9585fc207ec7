# learn.sh END: GPU 1: the delta rule with an offset after 300 million tokens at other rates, then short runs of 65,536 tokens
. /tmp/gpu/env.sh
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; touch /tmp/kernel_ready
export CUDA_VISIBLE_DEVICES=1
D=power_delta+offset=0.09 M=100139008:muon
names=$D:4096:0.0056:0:300417024:muon,$D:4096:0.0113:0:300417024:muon,window:65536:0.008:1:$M,power:65536:0.008:1:$M
step $(left $1) learning python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning.runs --workers 2 --minutes $(minutes $1) --compile --measures --names $names
