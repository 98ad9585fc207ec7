# alone.sh: what is compiled before the students' files are there
. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
export SHARED=/tmp/student/warm WINDOW=1024 PYTHONPATH=/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache_student TORCHINDUCTOR_CACHE_DIR=/tmp/icache_student
export TORCHINDUCTOR_COMPILE_THREADS=5
mkdir -p $SHARED $O/warm
stamp "begin warm"; timeout 170 bash /tmp/gpu/job.sh /tmp/repo /tmp $O/warm 0 170 warm > $O/warm/out.txt 2>&1; stamp "end warm"
touch /tmp/students_go
