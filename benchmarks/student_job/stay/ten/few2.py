from few_probe import *
import sympow.ops.triton.decode as dec
m=model()
on(); o,t,e=run(m,1,prof=True); say("PDL decode too",round(t,4),round(e,4))
for held in (8,):
    fr.HELD=held; o2,t,e=run(m,1); say("HELD",held,round(t,4),round(e,4),((o-o2).norm()/o.norm()).item())
fr.HELD=16
a=dec.ahead; dec.ahead=lambda d: {"AHEAD":False}; forget_launchers()
o2,t,e=run(m,1); say("PDL not in decode",round(t,4),round(e,4),((o-o2).norm()/o.norm()).item())
dec.ahead=a
for B in (2,4,8):
    o,t,e=run(m,B); say("B",B,"fused",round(t,4))
