# learn4.sh END: GPU 1: Gated DeltaNet and RWKV-7 with the kernels of flash-linear-attention and Triton 3.7.1, which it needs on Hopper
. /tmp/gpu/env.sh
wait_file /tmp/kernel_ready
cat /tmp/student/parts/t.0[0-4] > /tmp/triton.whl; [ $(sha256sum /tmp/triton.whl | cut -d' ' -f1) = $(cat /tmp/gpu/triton.sha) ] && stamp "triton whole"
mkdir -p /tmp/tri && python3 -m zipfile -e /tmp/triton.whl /tmp/tri; chmod -R +x /tmp/tri/triton/backends/nvidia/bin 2>/dev/null
export CUDA_VISIBLE_DEVICES=1 PYTHONPATH=/tmp/tri:$R:/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache37
python3 -c "import triton, fla; print(triton.__version__, fla.__version__)" > $O/versions.log 2>&1
step $(left $1) field python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/field.runs --workers 2 --minutes $(minutes $1) --measures --grids rates_slow,slow
