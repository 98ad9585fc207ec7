# learn1.sh END: GPU 1: the hybrid in rows of 65,536 tokens, then windows of 2,112; two at a time
. /tmp/gpu/env.sh; [ $GPUS = 1 ] && exit; export CUDA_VISIBLE_DEVICES=1
wait_file /tmp/kernel_ready
names=hybrid_heads_delta:65536:0.008:1:100139008:muon,hybrid_heads_delta:65536:0.008:2:100139008:muon
for c in 65536 16384; do for s in 0 1 2; do names=$names,window+window=2112:$c:0.008:$s:100139008:muon; done; done
step $(left $1) far1 python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/far1.runs --workers 2 --minutes $(minutes $1) --compile --measures --keep /tmp/keep1 --names $names
touch /tmp/learn1_done
