# same.sh: after the host, the comparison with the files in .gpu/base
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=$((GPUS - 1))
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/
wait_file /tmp/host_done
OMP_NUM_THREADS=1 step 560 same python3 -m benchmarks.same --base /tmp/base --workers $((GPUS == 1 ? 12 : 16)) --csv $O/same.csv; touch /tmp/same_done
