# learn2.sh END: [CST] Figure 1 with softmax attention and third seeds, then rows of 65,536 tokens in the body of RWKV-7
. /tmp/gpu/env.sh
wait_file /tmp/kernel_ready
B=head_norm=true R=65536:0.008
step $(left $1) learning2 python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning2.runs --workers 1 --minutes $(minutes $1) --compile --grids cst_contexts
names=""; for seed in 0 1 2; do for body in softmax power window; do names=$names,body_$body+$B:$R:$seed:30146560:muon; done; done
step $(left $1) bodies python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/bodies.runs --workers 1 --minutes $(minutes $1) --compile --names ${names#,}
