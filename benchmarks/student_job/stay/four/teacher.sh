# teacher.sh: the teacher's run folder of the GGUF file, and the held-out prose
. /tmp/gpu/env.sh
cd /tmp/student/parts && cat g.00 g.01 g.02 > /tmp/teacher.gguf && mkdir -p /tmp/docs && tar x -f docs.tar -C /tmp/docs && cd $R
python3 -m sympow.cli convert /tmp/teacher.gguf --pattern softmax --out /tmp/teacher > $O/teacher.log 2>&1; stamp "teacher rc $?"
touch /tmp/teacher_ready
