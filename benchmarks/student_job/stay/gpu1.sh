# gpu1.sh GPU END [GPU2]: 300 million tokens of two models and two seeds, four at once, then gates of key channels and
# pairs; grids of issue 60 on GPU2, or after the first on the same GPU
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=$1; END=$2
mins() { python3 -c "import time; print(max(0.2, ($END - (time.time() - float(open('/tmp/began').read()))) / 60))"; }
lists() { python3 /tmp/gpu/r1.py $O/$3_$1 $(mins) $2 $1 > $O/l_$3_$1.log 2>&1; stamp "$3 $1 end"; }
states() { for g in scra_states scra_bodies; do lists $g ${W:-3} g; done; }
lengths() { for g in based scra_lengths cst_contexts; do lists $g ${W:-3} g; done; }
stamp "gpu1 begin"
if [ -n "$3" ]; then (export CUDA_VISIBLE_DEVICES=$3; states & lengths & wait) & fi
lists bar2 4 r
touch /tmp/bar2_done
if [ -z "$3" ]; then W=2; states & lengths & fi
(timeout -k 5 $(( END - $(date +%s) + $(cat /tmp/began) )) python3 -m benchmarks.mqar mqar:pairs --device cuda --jobs 4 --best-rate --only "architecture.label=linear, Taylor map" \
    --csv $O/pairs.csv --out /tmp/pairs_runs > $O/l_pairs.log 2>&1; stamp "pairs end") &
(cp -r /tmp/repo /tmp/repo2; cp -r /tmp/gpu/kg/. /tmp/repo2/; export TREE=/tmp/repo2; . /tmp/gpu/env.sh; lists keygate 3 k) &
wait; stamp "gpu1 end"
