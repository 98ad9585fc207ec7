from few_probe import *
m=model()
def layer(slots,toks):
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for t in toks[:3]: slots.step(t)
        torch.cuda.synchronize()
    ev=sorted((e for e in p.events() if e.device_type.name=="CUDA"),key=lambda e:e.time_range.start)
    last=ev[-len(ev)//3:]; t0=last[0].time_range.start
    d=[i for i,e in enumerate(last) if e.name=="decode"]
    say(len(last),"span",last[-1].time_range.end-t0)
    for e in last[d[5]-4:d[7]+2]+last[-4:]: say("  start %8.2f end %8.2f %6.2f %s"%(e.time_range.start-t0,e.time_range.end-t0,e.time_range.end-e.time_range.start,e.name[:50]))
@torch.no_grad()
def show(B):
    prompt=torch.randint(50257,(B,64),device="cuda"); _,state=m.step(prompt,m.init_state(B))
    from sympow.models.slots import Slots
    slots=Slots.with_graphs(m,state,64,400); toks=torch.randint(50257,(20,B),device="cuda")
    for t in toks: slots.step(t)
    layer(slots,toks)
for B in (1,2,4,8,64):
    show(B); o,t,e=run(m,B,n=60); say("B",B,round(t,4))
fr.FEW_ROWS=4
for B in (3,4): o,t,e=run(m,B,n=60); say("few rows B",B,round(t,4))
fr.FEW_ROWS=1; show(2); o,t,e=run(m,2,n=60); say("more rows B 2",round(t,4))
import sympow.ops.triton.decode as dec
fr.FEW_ROWS=2
for what in ("decode","all"):
    dec.ahead=lambda d:{"AHEAD":False}
    if what=="all": fr.ahead=dec.ahead
    forget_launchers()
    for B in (8,64): o,t,e=run(m,B,n=60); say("no PDL in",what,"B",B,round(t,4))
