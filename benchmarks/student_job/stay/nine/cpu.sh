cd /work/main
P=.venv/bin/python
date
$P -m benchmarks.ops --device cpu --csv /tmp/c/ops_cpu.csv
$P -m benchmarks.decoding --csv /tmp/c/decoding_cpu.csv
$P -m benchmarks.serving --device cpu --threads 1 --csv /tmp/c/serving_cpu.csv
date; rm -rf /tmp/demo; .venv/bin/sympow demo --out /tmp/demo
date; $P -m benchmarks.context_restore /tmp/demo/demo-power --threads 1 --csv /tmp/c/context_restore_cpu.csv
$P -m benchmarks.speculation /tmp/demo/demo-power --threads 1 --csv /tmp/c/speculation_cpu.csv
date
$P -m benchmarks.serving --device cpu --threads 1 --hostile 50 --load-seconds 60 --measures hostile vanishing --csv /tmp/c/serving_load_cpu.csv
date; echo CPU DONE
