"""Fits single layers of a student to those of the teacher: align.py LAYER STEPS VARIANT..."""
import sys, time, json
import numpy as np, torch
from dataclasses import replace
import sympow.conversion.swap as S
from sympow.training import load_model
from sympow.conversion.distillation import load_teacher
torch.manual_seed(0); torch.set_num_threads(1)
layer, steps = int(sys.argv[1]), int(sys.argv[2])
T, R = 1024, 2
teacher = load_teacher("work/teacher").eval()
tok = np.fromfile("train.u16", "<u2").reshape(-1, 65536)
def rows(n, seed):
    r = np.random.default_rng(seed); out=[]
    for _ in range(n):
        d=r.integers(len(tok)); s=r.integers(65536-T); out.append(tok[d,s:s+T].astype(np.int64))
    return torch.from_numpy(np.stack(out))
seen={}
teacher.blocks[layer].mixer.register_forward_hook(lambda m,a,o: seen.update(x=a[0].detach(), y=(o[0] if isinstance(o,tuple) else o).detach()))
class Stop(Exception): pass
teacher.blocks[layer].register_forward_hook(lambda m,a,o: (_ for _ in ()).throw(Stop()))
@torch.no_grad()
def pair(t):
    try: teacher(t)
    except Stop: pass
    return seen["x"].clone(), seen["y"].clone()
import os
cache=f"pairs{layer}.pt"
if os.path.exists(cache): train, test = torch.load(cache)
else:
    train=[pair(rows(R,s)) for s in range(60)]; test=[pair(rows(R,10_000+s)) for s in range(3)]
    torch.save((train,test),cache)
def make(variant):
    opts=dict(kv.split("=") for kv in variant.split("+")[1:])
    kind=variant.split("+")[0]
    S.DELTA_SCORE=float(opts.pop("score",12)); S.BETA_BIAS=float(opts.pop("beta",-1)); 
    rot=opts.pop("rot",None)
    old=S._swapped
    def sw(kept,k,p,window,heads):
        m=old(kept,k,p,window,heads)
        o=dict(m.options)
        if rot and k=="delta":
            base={n:v for n,v in kept.options.items() if n in S._OF_ROTATIONS}
            o|=base; o["rotation"]="fixed"
            if rot!="full": o["rotary_fraction"]=float(rot)
        for n,v in opts.items():
            if k==kind: o[n]=json.loads(v)
        return replace(m,options=o)
    S._swapped=sw
    try:
        m=S.swap_mixers(teacher,(kind,),unshare="unshare" not in opts, window=512) if kind in("delta","power") else S.swap_mixers(teacher,(kind,),window=512)
    finally: S._swapped=old
    return m.blocks[layer].mixer
def err(mixer,pairs):
    with torch.no_grad():
        e=sum(((mixer(x)-y)**2).sum() for x,y in pairs); n=sum((y**2).sum() for _,y in pairs)
    return float(e/n)
for v in sys.argv[3:]:
    torch.manual_seed(0); began=time.time()
    mixer=make(v); first=err(mixer,test); marks=[]
    mats=[p for p in mixer.parameters()]
    opt=torch.optim.AdamW(mats,lr=1e-3,weight_decay=0,betas=(0.9,0.95))
    for s in range(steps):
        for g in opt.param_groups: g["lr"]=1e-3*min(1,(s+1)/10)*(1-s/steps*0.9)
        x,y=train[s%len(train)]
        loss=((mixer(x)-y)**2).sum()/(y**2).sum()
        opt.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(mats,1.0); opt.step()
        if s+1 in (20,steps//2): marks.append(round(err(mixer,test),4))
    print(layer,v,"first",round(first,4),*marks,"last",round(err(mixer,test),4),f"{time.time()-began:.0f} s",flush=True)
