# tables.sh GPU: compiles while other runs go on, waits for /tmp/learned if there are any, then measures
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=$1 TRITON_CACHE_DIR=/tmp/tcache_tables
stamp tables begin
for k in 64_2_True_12 32_2_True_12 128_2_True_12 64_2_False_12 64_2_True_2 32_3_True_12 16_4_True_12 128_2_True_8; do
  nice -n 10 timeout 400 python3 /tmp/gpu/prewarm.py $k > $O/warm_$k.log 2>&1; done &
(for i in 0 3 4 5; do nice -n 10 timeout 240 python3 /tmp/gpu/prewarm.py delta$i; done > $O/warm_delta.log 2>&1; nice -n 10 timeout 250 python3 /tmp/gpu/prewarm.py retention > $O/warm_retention.log 2>&1) &
wait; stamp warm
[ -n "$WAIT" ] && while [ ! -e /tmp/learned ]; do sleep 1; done
step 420 ops python3 -m benchmarks.ops --device cuda --peers cudnn,flash,retention,fla --csv $O/ops_gpu.csv --plot $O/ops_gpu.png
step 260 delta python3 -m benchmarks.delta --device cuda --csv $O/delta_gpu.csv
step 80 host python3 -m benchmarks.host --device cuda --csv $O/host_gpu.csv
step 100 brumby python3 -m benchmarks.brumby --device cuda --csv $O/brumby_gpu.csv
step 100 decoding python3 -m benchmarks.decoding --device cuda --csv $O/decoding_gpu.csv
step 120 conformal python3 -m benchmarks.training --csv $O/training_conformal_gpu.csv --contexts 16384 --mixers power-published power-conformal --modes compile
step 200 models python3 -m benchmarks.decoding --device cuda --models --preset small --tokens 60 --csv $O/decoding_models_gpu.csv
step 150 speed python3 -m benchmarks.training --csv $O/training_gpu.csv --contexts 65536 --mixers power power-delta softmax --modes compile
touch /tmp/tables_done; stamp tables end
