# learn2.sh END: GPU 1: Gated DeltaNet with seeds 1 and 2, with Triton 3.7.1 (parts t.0?) and flash-linear-attention (.gpu/fla, wheels)
. /tmp/gpu/env.sh; [ $GPUS = 1 ] && exit
wait_file /tmp/kernel_ready
mkdir -p /tmp/tri && cat /tmp/student/parts/t.0[0-9] | python3 -c "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('/tmp/tri')" && stamp "triton whole"
cp -r /tmp/gpu/amd/. /tmp/tri/ 2>/dev/null; chmod -R +x /tmp/tri/triton/backends/nvidia/bin; for w in /tmp/gpu/fla/*.whl; do python3 -m zipfile -e $w /tmp/tri; done
export CUDA_VISIBLE_DEVICES=1 PYTHONPATH=/tmp/tri:$R:/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache37
step $(left $1) slow python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/slow.runs --workers 1 --minutes $(minutes $1) --measures --names gated_delta_net:4096:0.004:1:100139008:muon,gated_delta_net:4096:0.004:2:100139008:muon
touch /tmp/learn2_done
