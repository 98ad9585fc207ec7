# prose.sh GPU END: AR hits on prose, three processes at once, one for each seed's recipes
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=$1; END=$2
mins() { python3 -c "import time; print(max(0.2, ($END - (time.time() - float(open('/tmp/began').read()))) / 60))"; }
stamp "prose begin"
python3 -m benchmarks.ar_hits run --corpus /tmp/prose --vocab-size 49152 --out $O/prose_muon --workers 3 --minutes $(mins) \
    --recipes power_delta_offset,softmax_gate,base_conv --rates 8e-3 --seeds 3 \
    training.optimizer=muon training.batch_size=64 training.steps=460 training.warmup_steps=46 execution.compile=true > $O/l_prose.log 2>&1
stamp "prose nine end"
python3 -m benchmarks.ar_hits run --corpus /tmp/prose --vocab-size 49152 --out $O/prose_muon --workers 3 --minutes $(mins) \
    --recipes power_delta_offset,softmax_gate,base_conv,power_delta --rates 8e-3 --seeds 3 \
    training.optimizer=muon training.batch_size=64 training.steps=460 training.warmup_steps=46 execution.compile=true >> $O/l_prose.log 2>&1
stamp "prose end"
