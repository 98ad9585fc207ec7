. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt; nproc >> $O/gpus.txt
step 170 host python3 -m benchmarks.host --device cuda --csv $O/host.csv; touch /tmp/host_done
step 130 decoding python3 -m benchmarks.decoding --device cuda --csv $O/decoding_h200.csv
step 200 models python3 -m benchmarks.decoding_models --device cuda --csv $O/decoding_models_h200.csv
step 100 hf python3 -m benchmarks.hf_generate --device cuda --csv $O/hf_generate_h200.csv
step 140 brumby python3 -m benchmarks.brumby --device cuda --csv $O/brumby_gpu.csv
touch /tmp/timed_done
