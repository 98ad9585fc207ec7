# setup.sh: keeps what came with this call; may be called many times
[ -e /tmp/began ] || date +%s > /tmp/began
mkdir -p /tmp/out /tmp/pkgs /tmp/corpus /tmp/prose /tmp/student/parts
[ -e .gpu ] && cp -rf .gpu/. /tmp/gpu/ 2>/dev/null || { mkdir -p /tmp/gpu; cp -rf .gpu/. /tmp/gpu/; }
if [ ! -e /tmp/repo ]; then mkdir -p /tmp/repo; cp -r benchmarks sympow tests docs scripts pyproject.toml README.md CONTRIBUTING.md CHANGELOG.md /tmp/repo/; fi
if [ -e .whl ] && [ ! -e /tmp/pkgs/zarr ]; then for w in .whl/*.whl; do python3 -m zipfile -e $w /tmp/pkgs; done; fi
[ -e .corpus ] && cp -rf .corpus/. /tmp/corpus/
[ -e .prose ] && cp -rf .prose/. /tmp/prose/
for d in .student/*; do [ -e $d ] && cp -rf $d/. /tmp/student/parts/; done
. /tmp/gpu/env.sh
nvidia-smi --query-gpu=name --format=csv,noheader > $O/gpus.txt; nproc >> $O/gpus.txt
pgrep -f "[c]ollect.sh" >/dev/null || setsid nohup bash /tmp/gpu/collect.sh >/dev/null 2>&1 &
ls /tmp/student/parts /tmp/corpus /tmp/prose | tr '\n' ' '; echo "$(( $(date +%s) - $(cat /tmp/began) )) s"
