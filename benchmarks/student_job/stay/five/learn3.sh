# learn3.sh END: GPU 0: random selection of mqar:hybrids_mixed, two runs at a time: 15 minutes beside others
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
grep -v "^random" $R/benchmarks/results/mqar_hybrids_mixed_gpu.csv > $O/mqar_hybrids_mixed_gpu.csv
step $(left $1) mqar python3 -m benchmarks.mqar mqar:hybrids_mixed --device cuda --jobs 2 --best-rate --csv $O/mqar_hybrids_mixed_gpu.csv --out /tmp/mixed
grep -v "^random" $R/benchmarks/results/mqar_hybrids_h200.csv > $O/mqar_hybrids_h200.csv
step $(left $1) mqar2 python3 -m benchmarks.mqar mqar:hybrids --device cuda --jobs 3 --csv $O/mqar_hybrids_h200.csv --out /tmp/hybrids
touch /tmp/learn3_done
