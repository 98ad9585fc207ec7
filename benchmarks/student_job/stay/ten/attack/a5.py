from h import *
import itertools,random,time,traceback
seed=int(sys.argv[1]); budget=float(sys.argv[2]); R=random.Random(seed); t0=time.time(); n=0; bad=0
SC=[None,{"rope_type":"linear","factor":4.0},{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":16},{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":16}]
while time.time()-t0<budget:
    mx=R.choice(["power","power_delta","softmax","window"]); nh=R.choice([1,2,3,4])
    o={"n_kv_heads":R.choice([k for k in (1,2,3,4) if nh%k==0]),"head_dim":R.choice([2,4,6,8]),"value_dim":R.choice([1,2,3,4,5,8,12]),
       "qk_norm":R.random()<.3,"bias":R.random()<.6,"out_bias":R.choice([None,True,False]),"short_convolution":R.choice([0,1,2,3,4,5]),
       "rotary_fraction":R.choice([1.0,.25,.5,.75]),"head_norm":R.random()<.5,"output_gate":R.random()<.6}
    if o["output_gate"]: o["output_gate_bias"]=R.random()<.5
    rot=R.choice(["fixed","fixed","none"]+(["data"] if mx=="power" else [])); o["rotation"]=rot
    if rot!="none":
        k=R.random()
        if k<.3: o["rope_scaling"]=R.choice(SC)
        elif k<.5: o|={"frequencies":"conformal","max_length":64.0}
        elif k<.7: o["rope_base"]=500.
    o["gate"]=R.random()<.7
    if mx=="window": o["window"]=R.choice([1,2,4])
    if mx=="power": o["p"]=R.choice([1,2,3]); 
    if mx=="power" and o["p"]%2: o["normalize"]=False
    if mx=="power_delta":
        if R.random()<.4: o["beta"]=R.choice([.5,1.,2.])
        else: o|={"beta_max":R.choice([1.,2.]),"beta_bias":.3}
        if R.random()<.3 and o["rotary_fraction"]<1: o["offset"]=.5
        if mx=="power_delta": o["p"]=R.choice([1,2])
    body=R.choice(["gpt2","llama"]); c={"d_model":R.choice([7,16,20,33,130]),"n_layers":R.choice([1,2]),"n_heads":nh,"vocab_size":R.choice([5,37]),"tie_embeddings":R.random()<.5}
    if body=="llama": c["mlp_hidden"]=R.choice([0,5,17,32])
    else: c["mlp_ratio"]=R.choice([0,1,2])
    half=R.random()<.35; B=R.choice([1,2,3,4,9,33,64,65]) if half else R.choice([1,2,3,5,8,9])
    try: m=model(mx,o,body=body,std=.2,dtype=torch.float16 if half else torch.float32,**c)
    except (ValueError,TypeError) as e: continue
    if nh==1 and o["head_norm"] and o["output_gate"] and (B<=3 if half else B<=8): continue
    n+=1
    try:
        e,se,k=compare(m,B=B,pre=R.choice([0,3]),steps=2,V=c["vocab_size"])
        if not e<(2e-2 if half else 2e-5): bad+=1; print("DIFF",e,se,k,mx,o,body,c,B,half,flush=True)
    except Exception as ex:
        off(); bad+=1; print("RAISED",type(ex).__name__,str(ex)[:200],mx,o,body,c,B,half,flush=True)
print("cases",n,"bad",bad)
