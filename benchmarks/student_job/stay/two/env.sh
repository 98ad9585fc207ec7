export R=${TREE:-/tmp/repo} O=/tmp/out
export PYTHONPATH=$R:/tmp/pkgs TRITON_CACHE_DIR=/tmp/tcache TORCHINDUCTOR_CACHE_DIR=/tmp/icache TORCHINDUCTOR_COMPILE_THREADS=6 PYTHONUNBUFFERED=1
cd $R
stamp() { echo "[$(( $(date +%s) - $(cat /tmp/began) )) s] $*" >> $O/log.txt; }
step() { # seconds name command...
  local s=$1 n=$2; shift 2; stamp "begin $n"; timeout -k 10 $s "$@" > $O/$n.log 2>&1; stamp "end $n rc $?"; }
export GPUS=$(nvidia-smi -L | wc -l)
