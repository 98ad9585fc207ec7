# recall.sh END: models trained from the start on the kernel's source and on rows that train recall (4 to 1), then needles
# and passkeys, also beyond a window. SMALL="model.d_model=32 ..." and STEPS=3 try it out on a CPU.
. /tmp/gpu/env.sh
END=$1; C=/tmp/corpus; W=/tmp/recall; mkdir -p $W/texts $O/recall; left() { echo $(( END - ($(date +%s) - $(cat /tmp/began)) )); }
PY=${PY:-python3}
$PY - $C $W <<'P'
import sys; from pathlib import Path; import numpy as np, zarr
from sympow.data import load_tokenizer
corpus, work = Path(sys.argv[1]), Path(sys.argv[2]); tokenizer = load_tokenizer(corpus / "tokenizer.json")
for split, count, most in (("train", 96, 65536), ("heldout", 12, 16384)):
    a = zarr.open_array(corpus / f"{split}.zarr", mode="r")
    texts = [tokenizer.decode(np.asarray(a[int(i)])[:most].tolist()) for i in np.linspace(0, a.shape[0] - 1, count).astype(int)]
    if split == "heldout": (work / "heldout.txt").write_text("\n\n".join(texts))
    else:
        for n, text in enumerate(texts):
            folder = work / "texts" / f"{n % 6}"; folder.mkdir(exist_ok=True); (folder / f"{n:03d}.txt").write_text(text)
P
for i in 0 1 2 3 4 5; do $PY -m sympow.cli needle-corpus $W/texts/$i --tokenizer $C --out $W/facts$i --rows ${ROWS:-1400} --row-tokens ${T:-4096} --every 200 --seed $i --quiet > $O/recall/facts$i.txt 2>&1 & done; wait
stamp "recall facts"
F=$W/facts0/train.zarr; for i in 1 2 3 4 5; do F=$F,$W/facts$i/train.zarr; done
train() { # name recipe options...
  local n=$1 r=$2; shift 2
  timeout -k 10 $(left) $PY -m sympow.cli train $r --out $W/$n data.kind=zarr data.path=none data.paths=$C/train.zarr,$F data.weights=24,1,1,1,1,1,1 \
    data.held_out_path=$C/heldout.zarr data.tokenizer=$C execution.compile=${COMPILE:-true} training.optimizer=muon training.learning_rate=8e-3 training.context=${T:-4096} \
    training.batch_size=${BATCH:-16} training.micro_batch_size=${BATCH:-16} training.steps=${STEPS:-1528} training.warmup_steps=${WARM:-153} training.evaluate_every=${STEPS:-764} training.checkpoint_every=${STEPS:-1528} $SMALL "$@" > $O/recall/train-$n.txt 2>&1
  stamp "recall $n rc $?"
  for k in "needles --task single --text $W/heldout.txt" passkey; do timeout -k 10 $(left) $PY -m sympow.cli $k $W/$n --context ${LENGTHS:-1024 2048 4096} --texts ${TEXTS:-20} --csv $O/recall/${k%% *}-$n.csv --quiet > $O/recall/${k%% *}-$n.txt 2>&1 & done; }
for m in ${MODELS:-power_delta window softmax_gate power window_delta}; do train $m scaling:$m; done
wait; stamp "recall end"
