. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/ && (cd /tmp/base && [ -s /tmp/gpu/base_added.txt ] && xargs rm -f < /tmp/gpu/base_added.txt)
wait_file /tmp/timed_done
OMP_NUM_THREADS=1 step 600 same python3 -m benchmarks.same --base /tmp/base --workers 14 --csv $O/same.csv; touch /tmp/same_done
