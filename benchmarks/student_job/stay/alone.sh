# alone.sh: what is compiled, and measured on the first of two GPUs, before the students' files are there
. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
if [ $GPUS -gt 1 ]; then
  (CUDA_VISIBLE_DEVICES=0 step 160 hf_generate python3 -m benchmarks.hf_generate --device cuda --csv $O/hf_generate.csv; touch /tmp/hf_done) &
  setsid nohup bash /tmp/gpu/ranks.sh > $O/ranks.out 2>&1 &
fi
export SHARED=/tmp/student/warm WINDOW=1024 PYTHONPATH=/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache_student TORCHINDUCTOR_CACHE_DIR=/tmp/icache_student
export TORCHINDUCTOR_COMPILE_THREADS=5
mkdir -p $SHARED $O/warm
stamp "begin warm"; timeout 170 bash /tmp/gpu/job.sh /tmp/repo /tmp $O/warm $((GPUS - 1)) 170 warm > $O/warm/out.txt 2>&1; stamp "end warm"
[ $GPUS -gt 1 ] && while [ ! -e /tmp/hf_done ]; do sleep 1; done
touch /tmp/students_go
wait
