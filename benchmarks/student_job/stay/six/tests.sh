# tests.sh END: the last GPU, alone: the tests that need a GPU with 14 workers, those that failed once more, memcheck; then training may use this GPU
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=$((GPUS - 1))
wait_file /tmp/host_done
export OMP_NUM_THREADS=1 PYTHONPATH=/tmp/pkgs
cp -r /tmp/repo /tmp/tested && cd /tmp/tested && mkdir -p build
run() { step $(left $1) $2 python3 -m tests.gpu --workers $3 --minutes $(minutes $(( $1 - 20 ))) --record /tmp/tested/build/gpu_passed_tests.csv --line $O/gpu_passed.csv; }
run $1 tests 14; run $1 tests_again 2
PYTORCH_NO_CUDA_MEMORY_CACHING=1 step $(left $1) memcheck compute-sanitizer --tool memcheck python3 -m pytest -q tests/ops/triton/test_kernels.py tests/ops/triton/test_delta.py tests/ops/fused tests/ops/test_decoding.py -k "half_precision or shorter or formula or (fused and kernel)"
touch /tmp/tests_done
