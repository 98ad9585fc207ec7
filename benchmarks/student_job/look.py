import numpy as np, torch, sys
from sympow.training import load_model
from sympow.evaluation.needles import *
from sympow.evaluation.needles import Prose, needle_text
from sympow.evaluation.passkey import native
import inspect
from sympow.data import load_tokenizer
from pathlib import Path
run=load_model("/work/weights/delta2"); print([f for f in dir(run) if not f.startswith("_")][:12])
tok=load_tokenizer(Path("/work/weights/delta2/tokenizer.json"))
prose=Prose(tok,Path("/work/weights/heldout.txt").read_text())
print(inspect.signature(native))
cont=native(run.model, "cpu") if len(inspect.signature(native).parameters)>1 else native(run.model)
for n in range(5):
    rng=np.random.default_rng([0,0,0,n])
    t=needle_text(prose,tok,"single","digits",4096,0.0,rng)
    pass
    print("wanted", t.answers if hasattr(t,"answers") else t[1:], flush=True)
    pass
    out=cont(torch.as_tensor(np.array([t.tokens])).long(),12) if hasattr(t,"tokens") else None
    print("got", [tok.decode(list(o)) for o in out.tolist()], flush=True)
