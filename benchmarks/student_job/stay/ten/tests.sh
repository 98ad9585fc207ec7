# tests.sh END: GPU 1 after the comparison: memcheck of the new kernels, and tests that need a GPU
. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=$((GPUS - 1))
wait_file /tmp/same_done
export OMP_NUM_THREADS=1
cp -r /tmp/repo /tmp/tested && mkdir -p /tmp/tested/build
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs PYTORCH_NO_CUDA_MEMORY_CACHING=1 step $(left $1) memcheck compute-sanitizer --tool memcheck python3 -m pytest -q tests/ops/triton/test_kernels.py tests/ops/triton/test_delta.py tests/ops/fused tests/ops/test_decoding.py -k "half_precision or shorter or formula or (fused and kernel) or step_products") &
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs step $(left $1) models python3 -m pytest -q -n 10 tests/models tests/layers tests/ops/fused tests/ops/test_decoding.py tests/ops/test_decoding_slots.py) 
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs step $(left $1) tests python3 -m tests.gpu --workers 12 --minutes $(minutes $(( $1 - 15 ))) --record /tmp/tested/build/gpu_passed_tests.csv --line $O/gpu_passed.csv)
wait; touch /tmp/tests_done
