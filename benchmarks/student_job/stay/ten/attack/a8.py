from h import *
print("1 head",compare(model("power",{"head_dim":8},n_heads=1),B=1,steps=1))
with torch.no_grad():
    m=model("power",{}); X=torch.randn(2,5,32); b=m.blocks[0]
    off(); y0=b.step(X[:,1:2],b.init_state(2))[0]; on(); y1=b.step(X[:,1:2],b.init_state(2))[0]; print("noncontig",(y0-y1).abs().max())
