cd /work/main
while pgrep -f "[s]ympow kernel-corpus" >/dev/null; do sleep 1; done
.venv/bin/python -m benchmarks.subset --corpus /work/prep/k/kernel --out /work/prep/k/subset --rows 1600 && cp /work/prep/k/kernel/tokenizer.json /work/prep/k/subset/
cd /work/prep/k/subset && tar cf ../kernel.tar train.zarr heldout.zarr tokenizer.json
rm -rf /work/main/.student/k[12]; mkdir -p /work/main/.student/k1 /work/main/.student/k2
split -n 2 -d ../kernel.tar /work/prep/k/kernel. && mv /work/prep/k/kernel.00 /work/main/.student/k1/ && mv /work/prep/k/kernel.01 /work/main/.student/k2/
printf 'x kernel.00\nx kernel.01\n' > /work/main/.student/k2/KERNEL_SUMS; ls -la /work/main/.student/k?
cd /work/main; .venv/bin/python -c "
from benchmarks.context_scaling.data import name_of
from benchmarks.learning import read_documents, SCALES
from pathlib import Path
print(name_of(read_documents(SCALES['full'], Path('/work/prep/k/subset')).train))"
echo KERNEL DONE; date
mkdir -p /work/prep/p
.venv/bin/sympow doc-corpus --source /work/prep/d/debs --vocab-size 16384 --out /work/prep/p/docs
.venv/bin/python -m benchmarks.subset --corpus /work/prep/p/docs --out /work/prep/p/subset --rows 600 && cp /work/prep/p/docs/tokenizer.json /work/prep/p/subset/
cd /work/prep/p/subset && tar cf ../prose.tar train.zarr heldout.zarr tokenizer.json; ls -la ../prose.tar
mkdir -p /work/main/.student/p1 /work/main/.student/p2
split -n 2 -d ../prose.tar /work/prep/p/prose. && mv ../prose.00 /work/main/.student/p1/ && mv ../prose.01 /work/main/.student/p2/
printf 'x prose.00\nx prose.01\n' > /work/main/.student/p2/PROSE_SUMS; echo PROSE DONE; date
