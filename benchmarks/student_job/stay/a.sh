date +%s > /tmp/began; mkdir -p /tmp/out /tmp/pkgs /tmp/gpu; cp -rf .gpu/. /tmp/gpu/; mkdir /tmp/repo; cp -r benchmarks sympow tests docs scripts pyproject.toml README.md CONTRIBUTING.md CHANGELOG.md /tmp/repo/
for w in .whl/*.whl; do python3 -m zipfile -e $w /tmp/pkgs; done
. /tmp/gpu/env.sh
python3 -c "import zarr, gguf, numcodecs; print('wheels', zarr.__version__)"; nvidia-smi --query-gpu=name,clocks.sm --format=csv,noheader
P="python3 -m pytest -q -p no:cacheprovider --maxfail 12"
step 170 t_step $P tests/ops/triton/test_delta_step.py &
step 170 t_rule $P tests/ops/test_delta_rule.py &
step 170 t_slots $P tests/models/test_slots.py &
step 170 t_hf $P tests/integrations/test_transformers_graphs.py &
step 120 check python3 /tmp/gpu/deltastep_bench.py check &
wait
step 60 time python3 /tmp/gpu/deltastep_bench.py time
step 75 sweep1 python3 /tmp/gpu/deltastep_bench.py sweep 1
step 60 sweep0 python3 /tmp/gpu/deltastep_bench.py sweep 0
step 60 sweep4 python3 /tmp/gpu/deltastep_bench.py sweep 4
cat $O/log.txt; tail -n 4 $O/t_*.log; grep -E "WRONG|worst|equals" $O/check.log; cat $O/time.log; grep -A8 "chosen" $O/sweep*.log
cp $O/*.log $O/log.txt $OUT/ 2>/dev/null; cd /tmp/out && tar czf $OUT/a.tgz .
