# prose.sh END: unpacks the prose, and measures AR hits on both GPUs
. /tmp/gpu/env.sh
python3 /tmp/gpu/unpack.py /tmp/student/parts /tmp/student/data > $O/unpack.log 2>&1
python3 /tmp/gpu/docs.py /tmp/student/data /tmp/docs >> $O/unpack.log 2>&1
export OMP_NUM_THREADS=3
run() { left=$(( END - ($(date +%s) - $(cat /tmp/began)) )); stamp "begin prose $1"
python3 -m benchmarks.ar_hits run --corpus /tmp/docs --rows 400 --vocab-size 49152 --recipes $2 --rates 8e-3 --seeds 3 \
  --workers 2 --minutes $(python3 -c "print(round($left/60,2))") --out $O/prose_$1 training.optimizer=muon training.batch_size=64 training.steps=460 \
  training.warmup_steps=46 execution.compile=true > $O/prose_$1.log 2>&1
stamp "end prose $1"; }
END=$1
(export CUDA_VISIBLE_DEVICES=1; run a power_delta,softmax_gate; run d power) &
while [ ! -e /tmp/timed_done ]; do sleep 1; done
export CUDA_VISIBLE_DEVICES=0; run b base_conv; run c hyena
wait
