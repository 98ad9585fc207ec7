# learn.sh GPU END: the runs of learning, of AR hits, and repeats, four at once
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=$1; END=$2
mins() { python3 -c "import time; print(max(0.2, ($END - (time.time() - float(open('/tmp/began').read()))) / 60))"; }
lists() { for l in "$@"; do python3 /tmp/gpu/r1.py $O/$l $(mins) 1 $l > $O/l_$l.log 2>&1; stamp "$l end"; done; }
stamp "learn begin"
lists long_heads based scra_states &
lists hybrid scra_lengths heads_middle &
(C="training.optimizer=muon training.batch_size=64 training.steps=460 training.warmup_steps=46 execution.compile=true"
 for n in 1 2 3; do python3 -m benchmarks.ar_hits run --corpus /tmp/prose --vocab-size 49152 --out $O/prose_offset --workers 1 --minutes $(mins) \
    --recipes power_delta_offset,softmax_gate,base_conv --rates 8e-3 --seeds $n $C >> $O/l_prose.log 2>&1; stamp "prose $n end"; done
 lists scra_bodies) &
(while [ ! -e /tmp/gpu/repeat/run.sh ] && [ $(( $(date +%s) - $(cat /tmp/began) )) -lt 800 ]; do sleep 1; done
 bash /tmp/gpu/repeat/run.sh /tmp/out 1 $(( $(cat /tmp/began) + END )) > $O/l_repeat.log 2>&1; stamp "repeats end"; lists cst_contexts) &
wait; stamp "learn end"; touch /tmp/learned
