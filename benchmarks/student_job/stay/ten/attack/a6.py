from h import *
# the near miss: is it rounding? double reference
o={'n_kv_heads': 3, 'head_dim': 4, 'value_dim': 3, 'qk_norm': False, 'bias': False, 'out_bias': False, 'short_convolution': 2, 'rotary_fraction': 1.0, 'head_norm': True, 'output_gate': True, 'output_gate_bias': False, 'rotation': 'none', 'gate': False, 'p': 3, 'normalize': False}
c={'d_model': 130, 'n_layers': 2, 'n_heads': 3, 'vocab_size': 5, 'tie_embeddings': True, 'mlp_hidden': 32}
m=model("power",o,body="llama",std=.2,**c)
m64=model("power",o,body="llama",std=.2,**c).double()
tok=torch.randint(5,(8,5),generator=torch.Generator().manual_seed(1)); off()
with torch.no_grad():
    for pre in (0,3):
        res=[]
        for mm,sw in ((m64,off),(m,off),(m,on)):
            off(); st=mm.init_state(8)
            if pre: st=mm.step(tok[:,:pre],st)[1]
            sw(); ls=[]
            for t in tok[:,pre:pre+2].split(1,1):
                l,st=mm.step(t,st); ls.append(l.double())
            res.append(torch.stack(ls))
        n=res[0].norm(); print("rounding pre",pre,[((r-res[0]).norm()/n).item() for r in res[1:]])
# slots, speculation, context
from sympow.models.slots import Slots
for mx,op in (("power",{}),("power",{"rotation":"data","short_convolution":2}),("power_delta",{}),("softmax",{"gate":True,"short_convolution":3}),("window",{"window":3,"gate":True})):
    m=model(mx,op,d_model=16,n_layers=1); tok=torch.randint(37,(4,14),generator=torch.Generator().manual_seed(2)); outs=[]
    for sw in (off,on):
        with torch.no_grad():
            off(); s=Slots(m,4,24); r=[]
            for row in range(3): s.put(m.step(tok[row:row+1,:2+row],m.init_state(1))[1],2+row)
            sw()
            for i in range(3): r.append(s.step(tok[:3,4+i]).clone())
            s.release(0); r.append(s.step(tok[:2,8]).clone())
            off(); stt=m.step(tok[3:4,:6],m.init_state(1))[1]; sw(); s.put(stt,6)
            for i in range(2): r.append(s.step(tok[:3,9+i]).clone())
            t=s.take(1); r.append(m.step(tok[:1,12:13],t)[0])
            # speculation
            st=m.init_state(2); _,st=m.step(tok[:2,:1],st); lg,after=m.try_step(tok[:2,1:4],st); st=after(2)
            l,st=m.step(tok[:2,5:6],st); r.append(l); l,st=m.step(tok[:2,6:7],st); r.append(l)
            lg,after=m.try_step(tok[:2,1:2],st); r.append(lg[:,-1]); st=after(0); l,st=m.step(tok[:2,7:8],st); r.append(l)
            outs.append([x.clone() for x in r])
    off(); print(mx,op,max(((a-b).norm()/a.norm()).item() for a,b in zip(*outs)))
# expanded / inference states
m=model("power",{},d_model=16,n_layers=1)
def attempt(f):
    for sw in (off,on):
        try:
            with torch.no_grad(): off(); r=f(sw); print("  ok",r)
        except Exception as e: print("  ",type(e).__name__,str(e)[:90])
    off()
T=torch.zeros(2,1,dtype=torch.long)
def exp(sw):
    st=m.init_state(2); st.layers[0].past=torch.zeros(1,3,16).expand(2,3,16); sw(); return m.step(T,st)[0].sum().item()
attempt(exp)
def inf(sw):
    with torch.inference_mode(): st=m.step(T,m.init_state(2))[1]
    sw(); return m.step(T,st)[0].sum().item()
attempt(inf)
def inf2(sw):
    sw()
    with torch.inference_mode():
        l,st=m.step(T,m.init_state(2)); l,st=m.step(T,st); return l.sum().item()
attempt(inf2)
def kept(sw):  # state handed in: changed the same way?
    st=m.init_state(2); st=m.step(T.repeat(1,3),st)[1]; sw(); a=st.layers[0].past; b=a.clone(); l,n=m.step(T,st)
    return (n.layers[0].past is a, (a-b).abs().sum().item()>0, (a[:,:2]-b[:,1:]).abs().max().item())
attempt(kept)
def d2(sw):
    st=m.init_state(2,dtype=torch.float16) ; sw(); l,st=m.step(T,st); l,st=m.step(T,st); return l.sum().item(), [str(t.dtype) for t in st.tensors()][:3]
attempt(d2)
for pos in (torch.tensor([3,4],dtype=torch.int32),torch.tensor([3,0,4,0])[::2],torch.tensor([3]).expand(2),torch.tensor([3,4.]).double(),torch.tensor(3),torch.tensor([3])):
    def cnt(sw):
        st=m.step(T.repeat(1,3),m.init_state(2))[1].counting(pos); sw(); l,st=m.step(T,st); l,st=m.step(T,st); p=st.layers[0].behind.position; return round(l.sum().item(),5),p.dtype,p.tolist()
    print(pos.dtype,tuple(pos.shape)); attempt(cnt)
