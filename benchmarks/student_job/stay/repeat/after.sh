#!/usr/bin/env bash
# after.sh FOLDER COMMIT, in the root of a checkout with git: FOLDER is OUT/repeat. Puts COMMIT in place of "unknown" and
# compares every file. PYTHON: the interpreter (default: .venv/bin/python). NO_WRITE=1: on a copy of repeated.csv, which is put back.
set -u
PY=${PYTHON:-.venv/bin/python}; export PYTHONPATH=$PWD
table=benchmarks/results/repeated.csv
[ -z "${NO_WRITE:-}" ] || { kept=$(mktemp); cp $table "$kept"; trap 'cp "$kept" $table' EXIT; }
files=$(find "$1" -mindepth 2 -type f \( -name '[a-z].csv' -o -path '*.csv/*/learning.csv' -o -path '*.csv/*/run.csv' -o -path '*.csv/*/ranks.csv' -o -path '*.csv/*/long_row.csv' \) -not -path '*.runs/*' -not -path '*/jobs/*' | sort)
"$PY" - "$2" $files <<'P'
import csv, sys
for path in sys.argv[2:]:
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    at = rows[0].index("commit")
    for row in rows[1:]:
        if row[at].startswith("unknown"):
            row[at] = sys.argv[1]
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
P
root=$(cd "$1" && pwd)
for path in $files; do
  path=$(realpath "$path"); rest=${path#"$root"/}; name=${rest%%.csv/*}.csv
  if [ "$name" = block_search.csv ] && [ -z "${BLOCK:-}" ]; then  # of another corpus: as rows of runs.csv, whose corpus it is
    name=context_scaling/runs.csv
  fi
  echo "== $name $rest"; "$PY" -m benchmarks.repeat "$name" "$path"
done
