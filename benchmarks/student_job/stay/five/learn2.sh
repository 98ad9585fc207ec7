# learn2.sh END: GPU 0: the delta rule after 300M tokens with seed 2, then windows and softmax attention after 100M tokens
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
wait_file /tmp/kernel_ready
step $(left $1) delta python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/delta.runs --workers 1 --minutes $(minutes $1) --compile --measures --names power_delta+offset=0.09:4096:0.008:2:300417024:muon
step $(left $1) field python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/field.runs --workers 2 --minutes $(minutes $1) --compile --measures --grids field
touch /tmp/learn2_done
