from few_probe import *
m=model()
for B in (1,2,8,64):
    on(); o,t,e=run(m,B,n=100,prof=B in(8,64)); off(); r,t2,e2=run(m,B,n=60); say("B",B,"fused",round(t,4),"single",round(e,4),"unfused",round(t2,4),((o-r).norm()/r.norm()).item())
on()
for B in (4,16,32):
    o,t,e=run(m,B,n=60); say("B",B,"fused",round(t,4))
fr.FEW_ROWS=1; o,t,e=run(m,2); say("B 2 by more_rows",round(t,4))
fr.FEW_ROWS=0; o,t,e=run(m,1); say("B 1 by more_rows",round(t,4))
fr.FEW_ROWS=2
del m
for mix,opts in (("power_delta",{}),("window",{"window":1024}),("softmax",{"gate":True,"output_gate":True,"head_norm":True,"short_convolution":4})):
    m=model(mix,**opts); on(); o,t,e=run(m,1,n=100,prof=True); off(); r,t2,e2=run(m,1,n=100); say(mix,"fused",round(t,4),"unfused",round(t2,4),((o-r).norm()/r.norm()).item())
