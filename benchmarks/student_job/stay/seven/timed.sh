# timed.sh: the only GPU: the host alone on the machine; the probe of K = 128 while caches get warm; K = 128 beside the files in .gpu/base
. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt; nproc >> $O/gpus.txt
mkdir -p /tmp/base && cp -r $R/sympow /tmp/base/ && cp -r /tmp/gpu/base/. /tmp/base/
step 100 host python3 -m benchmarks.host --device cuda --csv $O/host.csv; touch /tmp/host_done
PROBE_SECONDS=80 step 90 delta_probe python3 /tmp/gpu/edges_delta_probe.py &
step 100 warm_compare python3 -m benchmarks.compare --device cuda --base /tmp/base --times 8192 --csv /tmp/warm.csv &
step 100 warm_delta python3 -m benchmarks.delta --device cuda --times 131072 --csv /tmp/warm_delta.csv &
(PYTHONPATH=/tmp/base:$R:/tmp/pkgs step 100 warm_delta_base python3 -m benchmarks.delta --device cuda --times 131072 --csv /tmp/warm_delta_base.csv) &
wait
step 60 compare python3 -m benchmarks.compare --device cuda --base /tmp/base --times 8192 32768 131072 --csv $O/compare.csv
step 30 delta python3 -m benchmarks.delta --device cuda --times 131072 --csv $O/delta.csv
(PYTHONPATH=/tmp/base:$R:/tmp/pkgs step 30 delta_base python3 -m benchmarks.delta --device cuda --times 131072 --csv $O/delta_base.csv)
touch /tmp/timed_done
