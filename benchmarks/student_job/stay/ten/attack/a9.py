import os,sys,warnings; os.environ["OMP_NUM_THREADS"]="1"; sys.path.insert(0,os.environ["TREE"])
import torch; torch.set_num_threads(1)
from sympow.models import LanguageModel, MixerConfig, ModelConfig
m=LanguageModel(ModelConfig(vocab_size=37,d_model=32,n_layers=1,n_heads=4,mixers=(MixerConfig("softmax",{}),)),seed=0).eval(); n=0
def be(g,a):
    global n; n+=1; return g
with torch.no_grad():
    f=torch.compile(lambda x,s:m.blocks[0].step(x,s)[0],backend=be,dynamic=True)
    for B in (2,8,9,63,70):
        f(torch.randn(B,1,32),m.blocks[0].init_state(B)); print(B,"graphs",n)
