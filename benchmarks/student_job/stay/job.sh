#!/usr/bin/env bash
# job.sh TREE DATA OUT GPU SECONDS: trains and measures the student; see job.py beside this file.
#   TREE: checkout of the project; DATA: folder where the parts were unpacked; OUT: results (small files);
#   GPU: CUDA_VISIBLE_DEVICES; SECONDS: the total budget from now on.
# Environment: WINDOW (512), UNSHARE (1), WORK (folder for corpora and weights, default DATA/work), TOY (0).
set -u
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$1" && pwd) data=$(cd "$2" && pwd); mkdir -p "$3"; out=$(cd "$3" && pwd)
export CUDA_VISIBLE_DEVICES=$4 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec "${PYTHON:-python3}" "$here/job.py" "$tree" "$data" "$out" "$5" "$6"
