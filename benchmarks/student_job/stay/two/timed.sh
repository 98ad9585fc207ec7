. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
(export TORCHINDUCTOR_COMPILE_THREADS=3
for k in 64_2_True_12 32_2_True_12 128_2_True_12 64_2_False_12 64_2_True_2 32_3_True_12 16_4_True_12 128_2_True_8 fla retention; do
  CUDA_VISIBLE_DEVICES=1 timeout 150 python3 /tmp/gpu/prewarm.py $k > $O/warm_$k.log 2>&1 & done; wait; stamp "kernels warm") &
P=$!
while [ ! -e /tmp/kernel_ready ]; do sleep 0.5; done
export CUDA_VISIBLE_DEVICES=0
step 110 positions python3 -m benchmarks.positions --device cuda --corpus /tmp/kernel --csv $O/positions.csv
wait $P
step 420 ops python3 /tmp/gpu/ops_rest.py --device cuda --peers cudnn,flash,retention,fla --csv $O/ops_gpu.csv
touch /tmp/timed_done
