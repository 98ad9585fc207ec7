# ranks.sh: losses of one rank and of two, beside other work; nothing here is timed
. /tmp/gpu/env.sh
export TRITON_CACHE_DIR=/tmp/tcache_ranks OMP_NUM_THREADS=4
N="text chains learning recipe"
options() { case $1 in text) echo --text;; chains) ;; learning) echo --context 1024 --rows 32 --steps 300 --learning-rate 2e-3;;
  recipe) echo --text --preset small --context 65536 --rows 2 --learning-rate 1.2e-4 --warmup 100;; esac; }
for n in $N; do
  export CUDA_VISIBLE_DEVICES=1; step 260 ranks_one_$n python3 -m benchmarks.training_ranks --out /tmp/ranks/$n $(options $n)
  while [ ! -e /tmp/hf_done ]; do sleep 1; done
  export CUDA_VISIBLE_DEVICES=0,1; step 260 ranks_two_$n python3 -m torch.distributed.run --nproc-per-node 2 -m benchmarks.training_ranks --out /tmp/ranks/$n $(options $n)
  export CUDA_VISIBLE_DEVICES=1; step 260 ranks_then_$n python3 -m benchmarks.training_ranks --out /tmp/ranks/$n $(options $n)
  cp /tmp/ranks/$n/ranks.csv $O/ranks_$n.csv
done
