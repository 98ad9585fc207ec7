. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
(export TORCHINDUCTOR_COMPILE_THREADS=3
for k in 128_2_True_12 64_2_False_12 64_2_True_2 32_3_True_12 16_4_True_12 128_2_True_8 retention; do
  CUDA_VISIBLE_DEVICES=1 timeout 150 python3 /tmp/gpu/prewarm.py $k > $O/warm_$k.log 2>&1 & done; wait; stamp "kernels warm") &
P=$!
export CUDA_VISIBLE_DEVICES=0
(step 60 decoding_warm python3 -m benchmarks.context_scaling speed --variants hybrid_heads_delta,power --contexts 4096 --modes decoding --device cuda --csv /tmp/warm.csv)
wait $P
step 150 decoding python3 -m benchmarks.context_scaling speed --variants softmax_gate,hybrid_heads_delta,hybrid_delta_gate,hybrid_power_gate,heads_delta,window,power_delta,power --contexts 4096,65536 --modes decoding --device cuda --csv $O/speed.csv
step 200 conversion_decoding python3 -m benchmarks.conversion_decoding --device cuda --csv $O/conversion_decoding.csv
step 420 ops python3 /tmp/gpu/ops_rest.py --device cuda --peers cudnn,flash,retention,fla --csv $O/ops_gpu.csv
touch /tmp/timed_done
