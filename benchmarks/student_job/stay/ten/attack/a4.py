import os,sys,time,warnings; os.environ["OMP_NUM_THREADS"]="1"; warnings.filterwarnings("ignore")
sys.path.insert(0,os.environ["TREE"])
import torch;import sympow.models.bodies.base as _b; print(_b.__file__); torch.set_num_threads(1)
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from torch.export import export, Dim
def model(n,o={},**c): return LanguageModel(ModelConfig(**({"vocab_size":37,"d_model":32,"n_layers":1,"n_heads":4}|c),mixers=(MixerConfig(n,o),)),seed=0).eval()
from sympow.layers.cache import KVCache
class S(torch.nn.Module):
    def __init__(s,b): super().__init__(); s.b=b
    def forward(s,x,k,v):
        y,st=s.b.step(x,KVCache(k,v,3)); return y,st.k,st.v
m=model("softmax"); b=m.blocks[0]
with torch.no_grad(): st=b.step(torch.randn(3,3,32),b.init_state(3))[1]
for mx in (32,1024):
  for ng in (True,False):
    try:
        B=Dim("B",min=2,max=mx)
        with (torch.no_grad() if ng else torch.enable_grad()):
            e=export(S(b),(torch.randn(3,1,32),st.k,st.v),dynamic_shapes=({0:B},{0:B},{0:B}),strict=False)
        print("export max",mx,ng,"ok", e.range_constraints)
    except Exception as x: print("export",mx,ng,type(x).__name__,str(x)[:350])
try:
    T=Dim("T",min=2,max=64)
    with torch.no_grad(): e=export(S(b),(torch.randn(3,5,32),st.k,st.v),dynamic_shapes=({1:T},None,None),strict=False)
    print("export T ok")
except Exception as x: print("export T",type(x).__name__,str(x)[:300])
class H(torch.nn.Module):
    def __init__(s,m): super().__init__(); s.m=m
    def forward(s,t): return s.m.step(t,s.m.init_state(t.shape[0]))[0]
for ng in (True,False):
  for mx in (32,1024):
    try:
        B=Dim("B",min=2,max=mx)
        with (torch.no_grad() if ng else torch.enable_grad()):
            e=export(H(m),(torch.zeros(3,1,dtype=torch.long),),dynamic_shapes=({0:B},),strict=False)
        print("model export ok",ng,mx,e.range_constraints)
    except Exception as x: print("model export",ng,mx,type(x).__name__,str(x)[:350])
