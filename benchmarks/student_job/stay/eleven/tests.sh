. /tmp/gpu/env.sh; export CUDA_VISIBLE_DEVICES=0
wait_file /tmp/same_done
export OMP_NUM_THREADS=1
cp -r /tmp/repo /tmp/tested && mkdir -p /tmp/tested/build
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs step 60 compile python3 -m pytest -q -x tests/models/test_compile.py -k "each_part") &
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs step $(left $1) narrow python3 -m pytest -q -n 12 tests/ops/test_decoding.py tests/ops/test_decoding_slots.py tests/models/test_narrowed.py tests/models/test_slots.py tests/ops/fused/test_step_products.py tests/models/test_step_kernels.py tests/serving/test_engine.py)
(cd /tmp/tested && PYTHONPATH=/tmp/pkgs step $(left $1) rest python3 -m pytest -q -n 12 tests/ops/fused tests/layers tests/models)
wait; touch /tmp/tests_done
