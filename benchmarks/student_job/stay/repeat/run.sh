#!/usr/bin/env bash
# run.sh OUT PARALLEL END_EPOCH_SECONDS, in the root of a checkout: runs the lines of $JOBS (default: jobs.txt beside it).
# GPUS: ids that the jobs are dealt out over (default: all); GRACE: seconds that a job may go on after the end; LIMIT.
set -u
REPEAT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); export REPEAT
mkdir -p "$1"; export O; O=$(cd "$1" && pwd)/repeat; export END=$3 CORPUS=${CORPUS:-/tmp/corpus} GRACE=${GRACE:-45} LIMIT=${LIMIT:-420}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')}
read -ra ids <<< "${GPUS:-0}"; export REPEAT_GPUS=${REPEAT_GPUS:-${#ids[@]}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
export JOBS=${JOBS:-$REPEAT/jobs.txt}; [ -e "$JOBS" ] || JOBS=$REPEAT/$JOBS
export TAG; TAG=$(basename "$JOBS" .txt)
mkdir -p "$O/logs"
grep -o '^# [a-z][a-z_0-9/A-Z]*\.csv' "$JOBS" | cut -c3- | sort -u | while read -r file; do mkdir -p "$O/$file"; done
one() {
  n=$1; now=$(date +%s); line=$(grep -v '^#' "$JOBS" | grep -v '^$' | sed -n "${n}p")
  if [ "$now" -ge "$END" ]; then echo "$TAG $n not started" >> "$O/log.txt"; return 0; fi
  read -ra ids <<< "${GPUS:-0}"; gpu=${ids[$(( SLOT % ${#ids[@]} ))]}
  most=$(( END + GRACE - now )); [ "$most" -lt "$LIMIT" ] || most=$LIMIT
  CUDA_VISIBLE_DEVICES=${NO_GPU:-$gpu} timeout -k 10 "$most" bash -c "$line" > "$O/logs/$TAG.$n.log" 2>&1; rc=$?
  echo "$TAG $n gpu $gpu start $now end $(date +%s) rc $rc: $(cut -c1-150 <<< "$line")" >> "$O/log.txt"
}
export -f one
seq "$(grep -v '^#' "$JOBS" | grep -vc '^$')" | xargs -P "$2" --process-slot-var=SLOT -I{} bash -c 'one {}'
