# tests.sh END: the tests that need a GPU, beside training
. /tmp/gpu/env.sh
wait_file /tmp/tests_go
export OMP_NUM_THREADS=1 PYTHONPATH=/tmp/pkgs
cp -r /tmp/repo /tmp/tested && cd /tmp/tested && mkdir -p build
step $(left $1) tests nice -n 10 python3 -m tests.gpu --workers 8 --minutes $(minutes $(( $1 - 20 ))) --record $O/gpu_passed_tests.csv --line $O/gpu_passed.csv
