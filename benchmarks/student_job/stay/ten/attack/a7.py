from h import *
m=model("power",{},d_model=16,n_layers=1); T=torch.zeros(2,1,dtype=torch.long)
from sympow.models.lm import ModelState
for pos in (torch.tensor([3,4],dtype=torch.int32),torch.tensor([3,0,4,0])[::2],torch.tensor([3]).expand(2),torch.tensor(3),torch.tensor([3])):
    for sw in (off,on):
        off()
        try:
            with torch.no_grad():
                st=m.step(T.repeat(1,3),m.init_state(2))[1]; st=ModelState([l.counting(pos) for l in st.layers]); sw(); l,st=m.step(T,st); l,st=m.step(T,st); p=st.layers[0].behind.position
                print(tuple(pos.shape),pos.dtype,round(l.sum().item(),4),p.dtype,p.tolist())
        except Exception as e: print(tuple(pos.shape),pos.dtype,type(e).__name__,str(e)[:90])
from sympow.models.recall import RecallModel
off()
r=RecallModel(ModelConfig(vocab_size=37,d_model=16,n_layers=1,n_heads=4,mixers=(MixerConfig("power",{}),)),seed=0)
print("recall",compare(disturb(r,.1).eval(),B=2))
print("wide taps", compare(model("power",{"short_convolution":20},d_model=16,n_layers=1),B=1,pre=0,steps=1))
with torch.no_grad():
    on()
    for ctx in (torch.autocast("cpu",dtype=torch.bfloat16),):
        with ctx: print("autocast",m.step(T,m.init_state(2))[0].dtype,len(calls))
