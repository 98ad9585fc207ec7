# timed.sh: the host alone on the machine, then the comparison with the files in .gpu/base
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt; nproc >> $O/gpus.txt
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/
step 160 host python3 -m benchmarks.host --device cuda --csv $O/host.csv; touch /tmp/host_done
OMP_NUM_THREADS=1 step 560 same python3 -m benchmarks.same --base /tmp/base --workers 12 --csv $O/same.csv; touch /tmp/timed_done
