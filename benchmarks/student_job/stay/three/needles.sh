# needles.sh NAME LABEL END: GPU 0
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=2
python3 /tmp/gpu/build.py $1 $2 /tmp/student/parts /tmp/students > $O/build_$1.log 2>&1; stamp "built $1 rc $?"
wait_file /tmp/timed_done
ask() { n=$1; shift; step $(left $END) $n python3 -m sympow.cli "$@" --device cuda --csv $O/$n.csv; }
END=$3; M=/tmp/students/$2 T="--text /tmp/gpu/heldout.txt --texts 10"
for t in multikey tracing; do for c in 4096 8192 2048; do for v in words digits; do
  echo $t $c $v; done; done; done > /tmp/list_$1
[ $1 = h ] && (echo single 4096 words; echo single 8192 digits; echo single 4096 digits) >> /tmp/list_$1
[ $1 = d ] && ask passkeys32_d passkey $M --context 32768 --texts 10 &
export -f ask step stamp left; export O END M T
grep multikey /tmp/list_$1 > /tmp/list_$1.a; grep -v multikey /tmp/list_$1 > /tmp/list_$1.b
for l in a b; do (while read t c v; do ask ${t}_${c}_${v}_$1 needles $M --task $t --values $v --context $c $T < /dev/null; done < /tmp/list_$1.$l) & done
wait
