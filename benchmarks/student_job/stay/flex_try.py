"""Which way of compiling flex attention trains windows in several lengths? flex_try.py"""
import sys, time, traceback
import torch
from torch.nn import functional as F
from sympow.layers import flex_window
from torch.nn.attention.flex_attention import flex_attention

WAYS = {
    "default": {},
    "options": {"options": {"triton.coalesce_tiling_analysis": False}},
    "dynamic=False": {"dynamic": False},
    "dynamic=True": {"dynamic": True},
}
def check(way, T, heads=(6, 2), window=128):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
    out = flex_window.flex_attend_in_window(q, k, v, window)
    g = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), g)
    at = torch.arange(T, device="cuda")
    mask = (at[:, None] >= at) & (at[:, None] - at < window)
    qq, kk, vv = (x.detach().float().requires_grad_() for x in (q, k, v))
    want = F.scaled_dot_product_attention(qq, kk, vv, attn_mask=mask, enable_gqa=True)
    ref = torch.autograd.grad(want, (qq, kk, vv), g.float())
    return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip((out, *got), (want, *ref)))
for name, more in WAYS.items():
    torch._dynamo.reset()
    flex_window.compiled_flex_attention = lambda f=torch.compile(flex_attention, fullgraph=True, **more): f
    for T in (1024, 4096, 1000, 2048, 3000, 256, 8192 // 2):
        began = time.time()
        try:
            print(f"{name} {T}: error {check(name, T):.1e}, {time.time() - began:.1f} s", flush=True)
        except Exception as error:
            print(f"{name} {T}: {type(error).__name__} {str(error).strip()[:200]}", flush=True)
            break
    try:
        with torch.no_grad():
            for T in (1024, 640, 1536):
                q, k, v = (torch.randn(1, 2, T, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                flex_window.flex_attend_in_window(q, k, v, 128)
        print(name, "no grad fine", flush=True)
    except Exception as error:
        print(name, "no grad", type(error).__name__, str(error)[:200], flush=True)
