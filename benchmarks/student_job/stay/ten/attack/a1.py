from h import *
# one head with norm and gate
for B in (1,8,):
  for nh in (1,2):
    m=model("power",{"head_dim":8},n_heads=nh)
    print("heads",nh,"B",B,compare(m,B=B))
m=model("power",{"head_dim":8},n_heads=1,dtype=torch.float16)
for B in (3,4): print("f16 1 head B",B,compare(m,B=B))
# non contiguous x to a block
with torch.no_grad():
    m=model("power",{}); X=torch.randn(2,5,32); b=m.blocks[0]
    off(); y0=b.step(X[:,1:2],b.init_state(2))[0]; on(); y1=b.step(X[:,1:2],b.init_state(2))[0]
    print("noncontig x",(y0-y1).abs().max())
    m=model("softmax",{})
    off(); b=m.blocks[0]; y0=b.step(X[:,1:2],b.init_state(2))[0]; on(); y1=b.step(X[:,1:2],b.init_state(2))[0]
    print("noncontig x",(y0-y1).abs().max())
# past with odd strides
def tr(st):
    for l in st.layers:
        l.past=l.past.transpose(1,2).contiguous().transpose(1,2)
    return st
print("past strides",compare(model("power",{}),prep=tr))
def tr2(st):
    for l in st.layers:
        z=torch.zeros(l.past.shape[0]*2,l.past.shape[1]*2,l.past.shape[2]+3); z=z[::2,::2,:-3]; z.copy_(l.past); l.past=z
    return st
print("past strides2",compare(model("power",{}),prep=tr2))
for dt in (torch.float32,):
    print("f16 state f32", [compare(model("power",{},dtype=torch.float16),B=B,state_dtype=dt) for B in (1,5)])
    print("f16 state f32 softmax", [compare(model("softmax",{"short_convolution":3,"gate":True},dtype=torch.float16),B=B,state_dtype=dt) for B in (1,5)])
# state of data rotation
md=model("power",{"rotation":"data"}); mf=model("power",{})
for sw in (off,on):
    with torch.no_grad():
        off(); st=md.step(torch.zeros(1,3,dtype=torch.long),md.init_state(1))[1]; sw()
        try: print("data state->fixed",mf.step(torch.zeros(1,1,dtype=torch.long),st)[0].sum())
        except Exception as e: print("data state->fixed",type(e).__name__,e)
