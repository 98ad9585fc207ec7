# learn.sh END: GPU 1: the runs of 65,536 tokens, then a million tokens, then projections whole
. /tmp/gpu/env.sh
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; touch /tmp/kernel_ready
export CUDA_VISIBLE_DEVICES=1
names=softmax_gate:65536:0.008:0:100139008:muon,hybrid_heads_delta:65536:0.008:0:100139008:muon,power_delta:65536:0.008:0:100139008:muon,window:65536:0.008:0:100139008:muon,power:65536:0.008:0:100139008:muon
step $(left $1) learning python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning.runs --workers 2 --minutes $(minutes $1) --compile --measures --keep /tmp/kept --names $names
step $(left $1) long_text python3 -m benchmarks.long_text --corpus /tmp/full --runs $(for v in power_delta power hybrid_heads_delta window softmax_gate; do ls -d /tmp/kept/$v-65536-*; done) --documents 6 --csv $O/long_text_gpu.csv
step $(left $1) whole python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/whole.runs --workers 2 --minutes $(minutes $1) --compile --grids whole
