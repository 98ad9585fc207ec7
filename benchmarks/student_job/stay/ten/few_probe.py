import sys, time, torch
from unittest import mock
from sympow.models import LanguageModel, preset, MixerConfig, ModelConfig
import dataclasses
import sympow.ops.fused.step_products as fr
import sympow.layers.attention as at, sympow.models.bodies.base as bb, sympow.models.lm as lm
from sympow.ops.runtime.launcher import forget_launchers
from benchmarks.decoding import stepping, read
torch.manual_seed(0)
real=fr.takes_step
def off(): 
    f=lambda x,t: False
    at.takes_step=bb.takes_step=lm.takes_step=f
def on(): at.takes_step=bb.takes_step=lm.takes_step=real
T0=time.time()
def say(*a): print(f"{time.time()-T0:6.1f}",*a,flush=True)
def model(mixer="power",dtype=torch.bfloat16,**opts):
    cfg=preset("small",50257)
    if mixer!="power": cfg=dataclasses.replace(cfg,mixers=(MixerConfig(mixer,opts),))
    m=LanguageModel(cfg,seed=0).cuda().to(dtype).eval()
    return m
@torch.no_grad()
def run(m,B,n=200,prof=False):
    prompt=torch.randint(50257,(B,64),device="cuda",generator=torch.Generator("cuda").manual_seed(1))
    logits,state=m.step(prompt,m.init_state(B))
    from sympow.models.slots import Slots
    slots=Slots.with_graphs(m,state,64,64+3*n+300)
    toks=torch.randint(50257,(n,B),device="cuda",generator=torch.Generator("cuda").manual_seed(2))
    out=[slots.step(t).clone() for t in toks[:20]]
    torch.cuda.synchronize()
    best=1e9
    for r in range(3):
        a=time.perf_counter()
        for t in toks[:n]: slots.step(t)
        torch.cuda.synchronize(); best=min(best,(time.perf_counter()-a)/n)
    each=[]
    for t in toks[:100]:
        a=time.perf_counter(); slots.step(t); torch.cuda.synchronize(); each.append(time.perf_counter()-a)
    each.sort()
    if prof:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for t in toks[:3]: slots.step(t)
            torch.cuda.synchronize()
        ev=sorted((e for e in p.events() if e.device_type.name=="CUDA"),key=lambda e:e.time_range.start)
        last=ev[-len(ev)//3:]
        t0=last[0].time_range.start
        say("kernels a token",len(last),"span us",last[-1].time_range.end-t0)
        k=len(last)//2
        for e in last[:8]+last[k:k+14]+last[-6:]: say("  %8.2f %6.2f %s"%(e.time_range.start-t0,e.time_range.end-e.time_range.start,e.name[:70]))
    return torch.stack(out).float(),best*1e3,each[50]*1e3
