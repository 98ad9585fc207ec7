. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/
OMP_NUM_THREADS=1 step 400 same python3 -m benchmarks.same --base /tmp/base --workers 14 --csv $O/same.csv
step 200 host python3 -m benchmarks.host --device cuda --csv $O/host.csv
step 120 brumby python3 -m benchmarks.brumby --device cuda --csv $O/brumby_gpu.csv
step 120 a5 python3 -m benchmarks.training --contexts 16384 --mixers power-published power-conformal --device cuda --csv $O/training_a5.csv
touch /tmp/timed_done
