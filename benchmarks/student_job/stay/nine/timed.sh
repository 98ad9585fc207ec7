# timed.sh: GPU 0. The host alone on the machine; then speeds, with GPU 0 alone, while GPU 1 compares with the files in .gpu/base
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt; nproc >> $O/gpus.txt
step 170 host python3 -m benchmarks.host --device cuda --csv $O/host.csv; touch /tmp/host_done
if [ $GPUS = 1 ]; then wait_file /tmp/same_done; fi
step 90 speed python3 -m benchmarks.context_scaling speed --variants window+window=2112 --contexts 4096,65536 --modes compiled,decoding --csv $O/speed.csv
if [ $GPUS != 1 ]; then step 200 ops python3 -m benchmarks.ops --device cuda --csv $O/ops.csv --times 8192 32768 131072 --powers 2; fi
touch /tmp/timed_done
