# learn3.sh END: windows of 2,112 tokens in rows of 65,536 on GPU 1 and of 16,384 on GPU 0, three at a time
. /tmp/gpu/env.sh
for pair in 1:65536 0:16384; do
  c=${pair#*:}; names=window+window=2112:$c:0.008:0:100139008:muon,window+window=2112:$c:0.008:1:100139008:muon,window+window=2112:$c:0.008:2:100139008:muon
  CUDA_VISIBLE_DEVICES=${pair%:*} step $(left $1) wide$c python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/wide$c.runs --workers 3 --minutes $(minutes $1) --compile --measures --keep /tmp/keep$c --names $names &
done
wait
