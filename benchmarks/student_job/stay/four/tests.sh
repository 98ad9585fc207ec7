# tests.sh END: GPU 0: the tests that need a GPU
. /tmp/gpu/env.sh
wait_file /tmp/timed_done
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 PYTHONPATH=/tmp/pkgs
cp -r /tmp/repo /tmp/tested && cd /tmp/tested && mkdir -p build
step $(left $1) tests python3 -m tests.gpu --workers 12 --minutes $(minutes $(( $1 - 20 ))) --record $O/gpu_passed_tests.csv --line $O/gpu_passed.csv
