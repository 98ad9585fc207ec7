# tests.sh END: GPU 0: the tests that need a GPU with 13 workers, those that are left with 5, memcheck
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
wait_file /tmp/timed_done
export OMP_NUM_THREADS=1
cp -r /tmp/repo /tmp/tested && mkdir -p /tmp/tested/build
run() { (cd /tmp/tested && PYTHONPATH=/tmp/pkgs step $(left $1) $2 python3 -m tests.gpu --workers $3 --minutes $(minutes $(( $1 - 15 ))) --record /tmp/tested/build/gpu_passed_tests.csv --line $O/gpu_passed.csv); }
run $(( $1 - 170 )) tests 13
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs PYTORCH_NO_CUDA_MEMORY_CACHING=1 step 260 memcheck compute-sanitizer --tool memcheck python3 -m pytest -q tests/ops/triton/test_kernels.py tests/ops/triton/test_delta.py tests/ops/fused tests/ops/test_decoding.py -k "half_precision or shorter or formula or (fused and kernel)") &
run $1 tests_again 5
wait; touch /tmp/tests_done
