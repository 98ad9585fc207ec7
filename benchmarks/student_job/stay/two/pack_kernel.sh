cd /work/main && .venv/bin/python -m benchmarks.subset --corpus /work/prep/k/kernel --out /work/prep/k/subset --rows 1600 && cp /work/prep/k/kernel/tokenizer.json /work/prep/k/subset/
.venv/bin/python -c "
from benchmarks.context_scaling.data import name_of
from sympow.data import *
import sys
from pathlib import Path
from benchmarks.context_scaling.grid import Run, SCALES
d = open_corpus(Run('softmax', 65536).config(SCALES['full'], Path('/work/prep/k/subset')).data)
print(name_of(d.train), name_of(d.held_out))"
cd /work/prep/k/subset && tar cf ../kernel.tar train.zarr heldout.zarr tokenizer.json && ls -la ../kernel.tar
rm -rf /work/main/.student/k[12]; mkdir -p /work/main/.student/k1 /work/main/.student/k2
split -n 2 -d ../kernel.tar /work/prep/k/kernel. && mv /work/prep/k/kernel.00 /work/main/.student/k1/ && mv /work/prep/k/kernel.01 /work/main/.student/k2/
printf 'x kernel.00\nx kernel.01\n' > /work/main/.student/k2/KERNEL_SUMS; ls -la /work/main/.student/k?
