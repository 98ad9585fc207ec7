"""Engine on a hybrid of SmolLM2's shape with random weights, bf16: tokens/s with and without room; answers compared."""
import dataclasses, sys, time, torch
sys.path.insert(0, ".")
from sympow.data import ByteTokenizer
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.training import load
from sympow.serving import Engine
from tests.serving.conftest import Client, ask
DEV = "cuda" if torch.cuda.is_available() else "cpu"
run, prompt, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loaded = load(run)
model = loaded.model.to(DEV, torch.bfloat16).eval()
tok = loaded.tokenizer
print("layers", [m.name if hasattr(m, "name") else m for m in loaded.config.model.mixers][:6], flush=True)
answers = {}
for most in (None, 8192, 16384):
    t = time.time(); torch.cuda.empty_cache()
    engine = Engine(model, tok, slots=16, most=most, chunk=1024); engine.start()
    print(f"most {most}: start {time.time() - t:.1f} s, room {engine.room}, slots {engine.nbytes / 1e6:.0f} MB", flush=True)
    for streams in (1, 16):
        for turn in range(2):
            clients = [Client(torch.randint(40000, (prompt,), generator=torch.Generator().manual_seed(s)), new if turn else 16) for s in range(streams)]
            t = time.time(); got = ask(engine, *clients); took = time.time() - t
            if turn:
                drawn = [g[0] for g in got]
                answers[most, streams] = drawn
                same = sum(a == b for a, b in zip(drawn, answers[None, streams]))
                print(f"most {most}, {streams} streams: {streams * new / took:.0f} tokens/s, {took:.2f} s, {same} of {streams} answers as without room", flush=True)
    engine.close(); del engine
