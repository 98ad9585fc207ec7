import os,sys,warnings
os.environ["TRITON_INTERPRET"]="1"; os.environ["OMP_NUM_THREADS"]="1"
sys.path.insert(0,os.environ.get("TREE","/work/main"))
warnings.filterwarnings("ignore")
import torch; torch.set_num_threads(1)
import sympow
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.draws import disturb
try:
    from sympow.ops.fused import step_products as SP
    real=SP.launch; calls=[]
    def launch(k,*r,**t):
        calls.append(k); real(k,*r,**t)
    SP.launch=launch
    orig=SP.has_kernels
    def on(): SP.has_kernels=lambda d,t: True
    def off(): SP.has_kernels=lambda d,t: False
except ImportError: pass
def model(mixer,options,body="gpt2",std=0.1,dtype=torch.float32,**c):
    shape={"vocab_size":37,"d_model":32,"n_layers":2,"n_heads":4,"body":body}|c
    m=LanguageModel(ModelConfig(**shape,mixers=(MixerConfig(mixer,options),)),seed=0)
    return disturb(m,std).to(dtype).eval()
def leaves(s): return [t.clone() for t in s.tensors()]
@torch.no_grad()
def compare(m,B=2,pre=3,steps=3,state_dtype=None,prep=None,V=37):
    tok=torch.randint(V,(B,pre+steps),generator=torch.Generator().manual_seed(1))
    out=[]
    for sw in (off,on):
        off(); st=m.init_state(B,dtype=state_dtype)
        if pre: st=m.step(tok[:,:pre],st)[1]
        if prep: st=prep(st)
        sw(); calls.clear(); ls=[]
        for t in tok[:,pre:].split(1,1):
            l,st=m.step(t,st); ls.append(l)
        out.append((torch.stack(ls).double(),leaves(st),len(calls)))
    off()
    a,b=out
    e=((a[0]-b[0]).norm()/a[0].norm()).item()
    se=0.
    for x,y in zip(a[1],b[1]):
        assert x.shape==y.shape and x.dtype==y.dtype,(x.shape,y.shape,x.dtype,y.dtype)
        if x.numel(): se=max(se,((x.double()-y.double()).norm()/(x.double().norm()+1e-9)).item())
    return e,se,b[2]
