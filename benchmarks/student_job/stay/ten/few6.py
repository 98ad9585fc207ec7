from few_probe import *
m=model(); on()
for B in (1,2,4,8,64):
    o,t,e=run(m,B,n=100); off(); r,t2,e2=run(m,B,n=40); on(); say("B",B,"fused",round(t,4),"single",round(e,4),"parts",round(t2,4),((o-r).norm()/r.norm()).item())
