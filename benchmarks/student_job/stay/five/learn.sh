# learn.sh END: [SCRA]'s bodies with equal norms of heads, and [SPT]'s powers at a lower rate
. /tmp/gpu/env.sh
mkdir -p /tmp/kernel && cat /tmp/student/parts/kernel.[0-9][0-9] | tar x -C /tmp/kernel; touch /tmp/kernel_ready
step $(left $1) learning python3 -m benchmarks.learning run --corpus /tmp/kernel --out $O/learning.runs --workers 2 --minutes $(minutes $1) --compile --grids spt_powers,scra_windows,scra_lengths
touch /tmp/learn_done
