# learn.sh END: GPU 0: [SCRA] Figure 9 with equal norms of heads (what is missing), then linear attention again for curves along training
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; touch /tmp/kernel_ready
B=head_norm=true R=65536:0.008
names=""; for seed in 0 1 2; do for body in softmax power window; do names=$names,body_$body+$B:$R:$seed:30146560:muon; done; done
step $(left $1) bodies python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/bodies.runs --workers 2 --minutes $(minutes $1) --compile --names ${names#,}
names=""; for context in 32 1024 8192; do names=$names,body_linear:$context:0.008:0:30146560:muon; done
step $(left $1) again python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/again.runs --workers 2 --minutes $(minutes $1) --compile --again --names ${names#,}
touch /tmp/learn_done
