. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt
touch /tmp/timed_done
