from h import *
import torch.nn as nn
from sympow.models.norms import LayerNorm, RMSNorm
from sympow.layers.float32_linear import Float32Linear
def tryit(name,m,**k):
    try: print(name,compare(m,**k))
    except Exception as e: print(name,"RAISED",type(e).__name__,str(e)[:150])
def surg(name,f,mixer="power",opts={},**k):
    m=model(mixer,opts,**k); f(m); m.eval(); tryit(name,m)
# gate wrapper in softmax
surg("softmax gate Sequential",lambda m:setattr(m.blocks[0].mixer,"gate",nn.Sequential(m.blocks[0].mixer.gate)),"softmax",{"gate":True})
class L(Float32Linear):
    def forward(s,x): return super().forward(x)*0.5
def f(m):
    g=L(32,4); g.load_state_dict(m.blocks[0].mixer.gate.state_dict()); m.blocks[0].mixer.gate=g
surg("softmax gate subclass",f,"softmax",{"gate":True})
surg("window gate nn.Linear hook global",lambda m:None,"window",{"gate":True,"window":3})
def g(m):
    m.blocks[0].mlp_in=nn.Linear(32,m.blocks[0].mlp_in.out_features,bias=True)
surg("llama mlp_in bias",g,body="llama")
def g(m): m.blocks[0].mlp_out=nn.Linear(m.blocks[0].mlp_out.in_features,32,bias=True)
surg("llama mlp_out bias",g,body="llama")
def g(m): m.final_norm=LayerNorm(32,elementwise_affine=False)
surg("LN no affine",g)
class LN2(LayerNorm):
    def forward(s,x): return 2*super().forward(x)+1
def g(m): m.final_norm=disturb(LN2(32),.1)
surg("LN subclass",g)
def g(m):
    lin=m.blocks[0].mlp_out; o=lin.forward; lin.forward=lambda x:o(x)*3
surg("patched forward mlp_out",g)
def g(m):
    n=m.blocks[0].mixer_norm; o=n.forward; n.forward=lambda x:o(x)*3
surg("patched forward norm",g)
def g(m):
    lin=m.blocks[0].mixer.out; o=lin.forward; lin.forward=lambda x:o(x)*3
surg("patched forward out",g)
import torch.nn.modules.module as MM
m=model("power",{}); seen=[]
h=MM.register_module_forward_hook(lambda mod,i,o:(seen.append(type(mod).__name__), o*1.5 if isinstance(mod,nn.Linear) else None)[1])
tryit("global hook",m); h.remove()
# parametrize
import torch.nn.utils.parametrize as P
class Dbl(nn.Module):
    def forward(s,w): return w*1.7
for path in ("blocks.0.mixer.gate","blocks.0.mixer_norm","blocks.0.mixer.convolution","blocks.0.mixer.out","blocks.0.mixer.head_norm","embedding","blocks.0.mlp_in"):
    surg("param "+path,lambda m:P.register_parametrization(m.get_submodule(path),"weight",Dbl()))
surg("weightnorm",lambda m:nn.utils.parametrizations.weight_norm(m.blocks[0].mixer.gate))
surg("old weightnorm",lambda m:nn.utils.weight_norm(m.blocks[0].mlp_in))
surg("spectral",lambda m:nn.utils.parametrizations.spectral_norm(m.blocks[0].mixer.qkv))
import torch.nn.utils.prune as PR
for path in ("blocks.0.mixer.gate","blocks.0.mixer.qkv","blocks.0.mixer_norm"):
    surg("prune "+path,lambda m:PR.random_unstructured(m.get_submodule(path),"weight",amount=0.5))
def g(m): 
    w=m.blocks[0].mlp_in.weight; m.blocks[0].mlp_in.weight=nn.Parameter(w.data.t().contiguous().t())
surg("noncontig w",g)
def g(m):
    for p in m.parameters():
        flat=torch.empty(p.numel()+1); v=flat[1:].view_as(p); v.copy_(p.data); p.data=v
surg("odd offset",g)
surg("dynamic quant",lambda m:torch.ao.quantization.quantize_dynamic(m,{nn.Linear},inplace=True))
def g(m):
    for p in m.parameters(): p.requires_grad_(False)
surg("no grad",g)
# head override
class HM(LanguageModel):
    def _head(s,h): return 30*torch.tanh(super()._head(h)/30*10)
m=HM(ModelConfig(vocab_size=37,d_model=32,n_layers=1,n_heads=4,mixers=(MixerConfig("power",{}),)),seed=0); disturb(m,.1)
tryit("head override",m)
from sympow.layers.power import PowerAttention
class PA(PowerAttention):
    def projected(s,x): return super().projected(x)*1.5
m=model("power",{}); m.blocks[0].mixer.__class__=PA; tryit("subclass projected",m)
class PB(PowerAttention):
    def mix_step(s,x,st):
        y,st=super().mix_step(x,st); return y*2,st
m=model("power",{}); m.blocks[0].mixer.__class__=PB; tryit("subclass mix_step",m)
class PC(PowerAttention):
    def step(s,x,st,**e):
        y,st=super().step(x,st); return y*2,st
m=model("power",{}); m.blocks[0].mixer.__class__=PC; tryit("subclass step",m)
from sympow.models.bodies.gpt2 import GPT2Block
class RB(GPT2Block):
    def _narrowed(s,h): return s.mlp_out(torch.relu(h))
m=model("power",{}); m.blocks[0].__class__=RB; tryit("subclass block relu",m)
class W(nn.Module):
    def __init__(s,i): super().__init__(); s.i=i
    def step(s,x,st,**k): return s.i.step(x,st,**k)
    def extras(s,t): return s.i.extras(t)
m=model("power",{}); st0=m.init_state(2)
i=m.blocks[0].mixer; m.blocks[0].mixer=W(i); W.init_state=lambda s,*a,**k:s.i.init_state(*a,**k); W.state_size=lambda s,c:s.i.state_size(c)
tryit("mixer wrapper",m)
# dual head
import torch.autograd.forward_ad as fw
m=model("power",{}); 
for sw in (off,on):
  with torch.no_grad(), fw.dual_level():
    off(); st=m.init_state(1); sw()
    hw=m.head if m.head is not None else m.embedding
    key="blocks.1.mlp_out.weight"
    p=dict(m.named_parameters())[key]
    d=fw.make_dual(p.data,torch.ones_like(p))
    try:
        out=torch.func.functional_call(m,{key:d},(torch.zeros(1,1,dtype=torch.long),st)) if False else None
        old=m.blocks[1].mlp_out.weight; del m.blocks[1].mlp_out._parameters["weight"]; m.blocks[1].mlp_out.weight=d
        o=m.step(torch.zeros(1,1,dtype=torch.long),st)[0]; print("dual",fw.unpack_dual(o).tangent is not None)
    except Exception as e: print("dual",type(e).__name__,str(e)[:100])
    finally:
        del m.blocks[1].mlp_out.weight; m.blocks[1].mlp_out._parameters["weight"]=old
