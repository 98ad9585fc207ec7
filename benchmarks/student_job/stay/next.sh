# next.sh END GPUS: grids of learning on all GPUs, a queue for each; results in /tmp/out/n_GRID
. /tmp/gpu/env.sh
END=$1; GPUS=$2
mins() { python3 -c "import time; print(max(0.2, ($END - (time.time() - float(open('/tmp/began').read()))) / 60))"; }
queue() { # gpu workers grids...
  export CUDA_VISIBLE_DEVICES=$(( $1 % GPUS )); local w=$2; shift 2
  for g in $*; do python3 /tmp/gpu/r1.py $O/n_$g $(mins) $w $g > $O/l_n_$g.log 2>&1; stamp "n $g end"; done; }
(queue 0 4 search short_first controls) & (queue 1 4 field cst_contexts) & (queue 2 3 middle_65536 middle_16384 heads) &
(cp -r /tmp/repo /tmp/repo2; cp -r /tmp/gpu/kg/. /tmp/repo2/; export TREE=/tmp/repo2; . /tmp/gpu/env.sh; queue 3 3 keygate keygate_4096; unset TREE; . /tmp/gpu/env.sh; queue 3 2 small long_window) &
wait; stamp "next end"; touch /tmp/alldone
