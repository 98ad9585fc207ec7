"""The op at the shapes of mqar:equal_state against float64 in plain torch: errors of output and gradients, in norm."""
import torch
from sympow import power_attention
dev = "cuda" if torch.cuda.is_available() else "cpu"
def call(t, impl, gated):
    q, k, v, g = (x.detach().clone().requires_grad_() for x in t[:4])
    out = power_attention(q, k, v, g if gated else None, p=2, impl=impl)
    out = out[0] if isinstance(out, tuple) else out
    grads = torch.autograd.grad(out, (q, k, v, *((g,) if gated else ())), t[4].to(out.dtype))
    return (out.detach(), *grads)
B = 128 if dev == "cuda" else 2
for V in (13, 28, 58, 64):
    for gated in (True, False):
        for size in (0.3, 1.0, 4.0, 16.0):
            torch.manual_seed(V)
            q, k = (size * torch.randn(B, 256, 4, 16, device=dev) for _ in range(2))
            v = torch.randn(B, 256, 4, V, device=dev); d = torch.randn_like(v)
            g = torch.nn.functional.logsigmoid(torch.randn(B, 256, 4, device=dev) * 2 + 4)
            low = [x.bfloat16() for x in (q, k, v)] + [g, d.bfloat16()]
            want = call([x.double() for x in low], "eager", gated)
            got = call(low, "auto", gated)
            print(V, gated, size, *(f"{((a.double() - b).norm() / b.norm()).item():.1e}/{(a.double() - b).abs().max() / b.abs().max():.1e}" for a, b in zip(got, want)),
                  "finite" if all(x.isfinite().all() for x in got) else "NOT FINITE", flush=True)
