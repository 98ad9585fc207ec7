from few_probe import *
import os
m=model()
off(); ref,t,e=run(m,1); say("unfused bf16 B1 ms",round(t,4),"single",round(e,4))
m32=model(dtype=torch.float32); r32,t,e=run(m32,1); say("unfused f32 B1",round(t,4),round(e,4))
on(); o32,t,e=run(m32,1); say("fused f32 B1",round(t,4),round(e,4),"err",((o32-r32).norm()/r32.norm()).item())
o,t,e=run(m,1,prof=True); say("fused bf16 B1 PDL",round(t,4),round(e,4),"err to f32",((o-r32).norm()/r32.norm()).item(),"unfused",((ref-r32).norm()/r32.norm()).item())
fr._launches_ahead=lambda d: False
o,t,e=run(m,1,prof=True); say("fused bf16 B1 no PDL",round(t,4),round(e,4),((o-r32).norm()/r32.norm()).item())
fr._launches_ahead=lambda d: True
for held in (8,32):
    fr.HELD=held; o,t,e=run(m,1); say("HELD",held,round(t,4),round(e,4),((o-r32).norm()/r32.norm()).item())
fr.HELD=16
for B in (2,4,8,64):
    on(); o,t,e=run(m,B); off(); r,t2,e2=run(m,B,prof=B in(1,64)); say("B",B,"fused",round(t,4),"unfused",round(t2,4),((o-r).norm()/r.norm()).item())
