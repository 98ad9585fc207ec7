# timed.sh: GPU 1: the comparison with the files in .gpu/base, then the tests may begin
. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
export CUDA_VISIBLE_DEVICES=$((GPUS - 1))
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/
OMP_NUM_THREADS=1 step 700 same python3 -m benchmarks.same --base /tmp/base --workers 16 --csv $O/same.csv
touch /tmp/same_done
