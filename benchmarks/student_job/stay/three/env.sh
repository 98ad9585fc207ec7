export R=/tmp/repo O=/tmp/out
export PYTHONPATH=$R:/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache TORCHINDUCTOR_CACHE_DIR=/tmp/icache TORCHINDUCTOR_COMPILE_THREADS=6 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=3
cd $R
stamp() { echo "[$(( $(date +%s) - $(cat /tmp/began) )) s] $*" >> $O/log.txt; }
step() { # seconds name command...
  local s=$1 n=$2; shift 2; stamp "begin $n"; timeout -k 10 $s "$@" > $O/$n.log 2>&1; stamp "end $n rc $?"; }
left() { echo $(( $1 - ($(date +%s) - $(cat /tmp/began)) )); }
minutes() { python3 -c "print(round($(left $1)/60,2))"; }
wait_file() { while [ ! -e $1 ]; do sleep 1; done; }
export GPUS=$(nvidia-smi -L | wc -l)
