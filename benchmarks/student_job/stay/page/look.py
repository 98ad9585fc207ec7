import sys, numpy as np, torch
sys.path.insert(0,"/work/main")
from sympow.training import load
from sympow.models import generate
from sympow.evaluation.needles import Prose, needle_text
run = load(sys.argv[1]); model=run.model.eval(); tok=run.tokenizer
prose=Prose(tok, open("/work/main/docs/guides/conversion.md").read())
for values in ("digits","words"):
  for n in range(3):
    rng=np.random.default_rng(n)
    t=needle_text(prose,tok,"single",values,int(sys.argv[2]),0.3,rng)
    got=generate(model, torch.from_numpy(t.tokens)[None], 20, temperature=0).tokens[0].tolist()
    print(values, t.answers, t.distance, repr(tok.decode(got)))
