import os,sys,time,warnings; os.environ["OMP_NUM_THREADS"]="1"; warnings.filterwarnings("ignore")
sys.path.insert(0,os.environ["TREE"])
import torch; torch.set_num_threads(1)
from sympow.models import LanguageModel, MixerConfig, ModelConfig
import sympow; print(sympow.__file__)
def model(n,o={},**c): return LanguageModel(ModelConfig(**({"vocab_size":37,"d_model":32,"n_layers":1,"n_heads":4}|c),mixers=(MixerConfig(n,o),)),seed=0).eval()
from torch.export import export, Dim
class S(torch.nn.Module):
    def __init__(s,b): super().__init__(); s.b=b
    def forward(s,x,past,mem):
        from sympow.layers.short_convolution import ShortConvolutionState as C
        from sympow.layers.power_delta import PowerDeltaState as P
        y,st=s.b.step(x,C(past,P(mem,3))); return y,st.past,st.behind.memory
m=model("power_delta"); b=m.blocks[0]; st=b.init_state(3)
args=(torch.randn(3,1,32),st.past,st.behind.memory)
for mx in (32,1024):
  for ng in (True,False):
    try:
        B=Dim("B",min=2,max=mx); t=time.time()
        with (torch.no_grad() if ng else torch.enable_grad()):
            e=export(S(b),args,dynamic_shapes=({0:B},{0:B},{0:B}),strict=False)
        print("export max",mx,ng,"ok",round(time.time()-t,1), e.range_constraints)
    except Exception as x: print("export",mx,ng,type(x).__name__,str(x)[:500])
try:
    T=Dim("T",min=1,max=64)
    with torch.no_grad(): e=export(S(b),(torch.randn(3,5,32),st.past,st.behind.memory),dynamic_shapes=({1:T},None,None),strict=False)
    print("export T ok")
except Exception as x: print("export T",type(x).__name__,str(x)[:300])
# compile fullgraph
for n,o in (("power",{}),("softmax",{"gate":True})):
  for body in ("gpt2","llama"):
    m=model(n,o,body=body)
    try:
        torch._dynamo.reset()
        cnt=0
        def be(g,a):
            global cnt; cnt+=1; return g
        with torch.no_grad():
            f=torch.compile(lambda x,s:m.blocks[0].step(x,s),backend=be,fullgraph=True,dynamic=True)
            for B in (2,5,9,70):
                x=torch.randn(B,1,32); s=m.blocks[0].init_state(B); f(x,s)
        print("compile",n,body,"ok graphs",cnt)
    except Exception as x: print("compile",n,body,type(x).__name__,str(x)[:400])
# vmap, fake
from torch._subclasses.fake_tensor import FakeTensorMode
m=model("power")
try:
    with torch.no_grad():
        xs=torch.randn(3,1,1,32)
        def f(x): return m.blocks[0]._stepped_mlp(x) if hasattr(m.blocks[0],"_stepped_mlp") else m.blocks[0].with_mlp(x)
        print("vmap",torch.func.vmap(f)(xs).shape)
        with FakeTensorMode(allow_non_fake_inputs=True):
            print("fake",type(m.blocks[0].step(torch.empty(1,1,32),m.blocks[0].init_state(1))[0]).__name__)
    mm=LanguageModel(m.config).to("meta")
    with torch.no_grad(): print("meta",mm.step(torch.zeros(1,1,dtype=torch.long,device="meta"),mm.init_state(1))[0].shape)
except Exception as x: print(type(x).__name__,str(x)[:300])
with torch.no_grad():
    s=m.init_state(1)
    try:
        tr=torch.jit.trace(lambda t:m.step(t,m.init_state(1))[0],(torch.zeros(1,1,dtype=torch.long),),check_trace=False); print("jit ok")
    except Exception as x: print("jit",type(x).__name__,str(x)[:200])
for x in (torch.randn(32),torch.randn(1,32)):
    try:
        with torch.no_grad(): m.blocks[0].step(x,m.blocks[0].init_state(1))
    except Exception as e: print("bad x",type(e).__name__,str(e)[:80])
