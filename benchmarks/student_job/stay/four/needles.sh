# needles.sh END: GPU 0: the bars of converted models
. /tmp/gpu/env.sh
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=2
(python3 /tmp/gpu/build.py d delta-B /tmp/student/parts /tmp/students > $O/build_d.log 2>&1; stamp "built d rc $?") &
python3 /tmp/gpu/build.py h hybrid_delta-B /tmp/student/parts /tmp/students > $O/build_h.log 2>&1; stamp "built h rc $?"
bash /tmp/gpu/teacher.sh; wait
wait_file /tmp/timed_done
END=$1; S=/tmp/students D=/tmp/docs
ask() { n=$1; shift; step $(left $END) $n python3 -m sympow.cli "$@" --texts 10 --device cuda --csv $O/$n.csv; }
bench() { step $(left $END) measure_$1 python3 -m benchmarks.conversion measure $S/$2 --teacher /tmp/teacher --parts loss positions --position-rows 24 --data kind=zarr --data paths=$D/heldout.zarr --data weights=1 --data held_out_path=$D/heldout.zarr --data tokenizer=$D --data pack=false --device cuda --csv $O/measure_$1.csv; }
(bench d delta-B; bench h hybrid_delta-B) &
(ask words8_d needles $S/delta-B --task single --values words --context 8192 --text /tmp/gpu/heldout.txt; ask keys4_d passkey $S/delta-B --context 4096; ask keys16_d passkey $S/delta-B --context 16384) &
(ask keys4_h passkey $S/hybrid_delta-B --context 4096 8192; ask keys16_h passkey $S/hybrid_delta-B --context 16384) &
(ask keys32_h passkey $S/hybrid_delta-B --context 32768) &
wait; touch /tmp/needles_done; stamp "needles done"
