# gpu1.sh GPU END: 300 million tokens of two models and two seeds, four at once; then grids of issue 60
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=$1; END=$2
mins() { python3 -c "import time; print(max(0.2, ($END - (time.time() - float(open('/tmp/began').read()))) / 60))"; }
lists() { python3 /tmp/gpu/r1.py $O/$1 $(mins) $2 $1 > $O/l_$1.log 2>&1; stamp "$1 end"; }
stamp "gpu1 begin"
lists bar2 4
touch /tmp/bar2_done
(lists based 2) & (lists scra_states 2) & (lists scra_lengths 1) &
(timeout -k 5 $(( END - $(date +%s) + $(cat /tmp/began) )) python3 -m benchmarks.mqar mqar:pairs --device cuda --jobs 4 --best-rate --only "architecture.label=linear, Taylor map" \
    --csv $O/pairs.csv --out /tmp/pairs_runs > $O/l_pairs.log 2>&1; stamp "pairs end") &
(cp -r /tmp/repo /tmp/repo2; cp -r /tmp/gpu/kg/. /tmp/repo2/; export TREE=/tmp/repo2; . /tmp/gpu/env.sh; lists keygate 3) &
wait; stamp "gpu1 end"
