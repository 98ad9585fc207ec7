# tests.sh END: the last GPU: the tests that need a GPU, once `same` has compiled most kernels. Their lines are 600 kB: packed alone.
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=$((GPUS - 1))
wait_file /tmp/same_done
export OMP_NUM_THREADS=1 PYTHONPATH=/tmp/pkgs
cp -r /tmp/repo /tmp/tested && cd /tmp/tested && mkdir -p build
step $(left $1) tests python3 -m tests.gpu --workers 14 --minutes $(minutes $(( $1 - 20 ))) --record /tmp/tested/build/gpu_passed_tests.csv --line $O/gpu_passed.csv
