# learn3.sh END: random selection again, of text and of recall
. /tmp/gpu/env.sh
wait_file /tmp/kernel_ready
python3 -m benchmarks.subset --corpus /tmp/kernel --out /tmp/subset --rows 400 > $O/subset.log 2>&1
usual="training.optimizer=muon training.batch_size=64 training.steps=460 training.warmup_steps=46 execution.compile=true"
step $(left $1) controls python3 -m benchmarks.ar_hits run --corpus /tmp/subset --out $O/kernel_random --workers 1 --recipes control_base_conv,control_random --rates 8e-3 --minutes $(minutes $1) $usual
step $(left $1) controls2 python3 -m benchmarks.ar_hits run --corpus /tmp/subset --out $O/kernel_random --workers 1 --recipes control_attention --rates 4e-3 --minutes $(minutes $1) $usual
grep -v "^random" $R/benchmarks/results/mqar_hybrids_mixed_gpu.csv > $O/mqar_hybrids_mixed_gpu.csv
step $(left $1) mqar python3 -m benchmarks.mqar mqar:hybrids_mixed --device cuda --jobs 2 --best-rate --csv $O/mqar_hybrids_mixed_gpu.csv --out /tmp/mixed
