# mqar.sh GPU: attention after convolution, N 512, other seeds at the rate 0.01
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=$1 TRITON_CACHE_DIR=/tmp/tcache_mqar OMP_NUM_THREADS=2
for id in attention-after-convolution-2-layers-n512-d64-w128-lr0.01-s0-ff5089edc7 attention-after-convolution-4-layers-n512-d64-w128-lr0.01-s0-c769b9d9e6; do
  step 900 mqar_${id:29:1} python3 /tmp/gpu/mqar_seeds.py mqar:deep $O/mqar_${id:29:1}/x.csv $id 1,2 0.01; done
