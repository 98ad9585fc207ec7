# TREE: a checkout with .venv; WORK: an empty folder
cd $WORK; export OMP_NUM_THREADS=1
$TREE/.venv/bin/sympow kernel-corpus --source debs_src/linux-source-6.1_6.1.176-1_all.deb --out kernel > prep_k.log 2>&1
cd $TREE && .venv/bin/python -m benchmarks.subset --corpus $WORK/kernel --out .corpus --rows 1600 >> $WORK/prep_k.log 2>&1
cp $WORK/kernel/tokenizer.json .corpus/
.venv/bin/python -c "
from benchmarks.context_scaling.data import name_of
from pathlib import Path
print(name_of(Path('.corpus')))" >> $WORK/prep_k.log 2>&1
echo DONE >> $WORK/prep_k.log
