# timed.sh: GPU 0. The host alone on the machine; then decoding, with GPU 0 alone, while GPU 1 compares with the files in .gpu/base
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt; nproc >> $O/gpus.txt
step 170 host python3 -m benchmarks.host --device cuda --csv $O/host.csv; touch /tmp/host_done
step 120 decoding python3 -m benchmarks.decoding --device cuda --csv $O/decoding_h200.csv
step 200 models python3 -m benchmarks.decoding_models --device cuda --csv $O/decoding_models_h200.csv
step 100 hf python3 -m benchmarks.hf_generate --device cuda --csv $O/hf_generate_h200.csv
step 140 brumby python3 -m benchmarks.brumby --device cuda --csv $O/brumby_gpu.csv
step 220 serving python3 -m benchmarks.serving --device cuda --preset small --vocab-size 50257 --streams 1 16 64 --new-tokens 1024 --rounds 2 --measures throughput first-token prefix memory --prefix 100000 --lengths 1000 10000 100000 1000000 --csv $O/serving_h200.csv
touch /tmp/timed_done
