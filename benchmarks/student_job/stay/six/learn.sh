# learn.sh END: GPU 0: rows of 65,536 tokens (seeds 1 and 2), RWKV-7 in its body at 65,536, the rest of prose
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; wait_file /tmp/host_done; touch /tmp/kernel_ready
names=""; for seed in 1 2; do for v in softmax_gate power_delta hybrid_heads_delta; do names=$names,$v:65536:0.008:$seed:100139008:muon; done; done
step $(left $1) far python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/far.runs --workers 2 --minutes $(minutes $1) --compile --measures --keep /tmp/keep --names ${names#,}
step $(left $1) rwkv python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/rwkv.runs --workers 1 --minutes $(minutes $1) --compile --names body_rwkv7:65536:0.008:0:30146560:muon
step 100 probe python3 -m sympow.cli recall-probe /tmp/keep/* --length 1024 --filler zero --csv $O/recall_probe.csv
