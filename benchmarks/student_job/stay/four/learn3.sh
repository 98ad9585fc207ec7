# learn3.sh END: GPU 0: the published forms of [SPT] at three rates
. /tmp/gpu/env.sh
wait_file /tmp/kernel_ready; wait_file /tmp/timed_done; wait_file /tmp/needles_done
export CUDA_VISIBLE_DEVICES=0
step $(left $1) learning3 python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning3.runs --workers 3 --minutes $(minutes $1) --compile --grids spt_powers
