# next.sh END GPUS: grids of learning beside the student on one GPU; results in /tmp/out/n_GRID
. /tmp/gpu/env.sh
END=$1; export CUDA_VISIBLE_DEVICES=0
mins() { python3 -c "import time; print(max(0.2, ($1 - (time.time() - float(open('/tmp/began').read()))) / 60))"; }
queue() { # until workers grids...
  local until=$1 w=$2; shift 2
  for g in $*; do [ $(( $(date +%s) - $(cat /tmp/began) )) -lt $until ] || break
    python3 /tmp/gpu/r1.py $O/n_$g $(mins $(( END - 110 ))) $w $g > $O/l_n_$g.log 2>&1; stamp "n $g end"; done; }
LAST=$(( END - 200 ))
queue $LAST 2 search
queue $LAST 2 short_first
queue $LAST 2 cst_contexts
while pgrep -f "[j]ob.py" >/dev/null && [ $(( $(date +%s) - $(cat /tmp/began) )) -lt $(( END - 112 )) ]; do sleep 1; done
step $(( END + 8 - ($(date +%s) - $(cat /tmp/began)) )) decoding python3 -m benchmarks.conversion_decoding --device cuda --csv $O/conversion_decoding.csv
stamp "next end"
