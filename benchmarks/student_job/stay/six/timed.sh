# timed.sh: GPU 0: the host alone on the machine, then the probe of K = 128, the comparison with the files in .gpu/base, K = 128 beside it
. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/
step 200 host python3 -m benchmarks.host --device cuda --csv $O/host.csv; touch /tmp/host_done
[ -e /tmp/gpu/edges_delta_probe.py ] && step 70 delta_probe python3 /tmp/gpu/edges_delta_probe.py
OMP_NUM_THREADS=1 step 700 same python3 -m benchmarks.same --base /tmp/base --workers 12 --csv $O/same.csv
touch /tmp/same_done
