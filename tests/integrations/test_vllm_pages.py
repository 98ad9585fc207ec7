"""Steps on pages, laid out as vLLM lays out its cache, against steps on states of their own. This needs no vLLM.

On a GPU the kernels run on the pages, and elsewhere in Triton's interpreter.
"""

import pytest
import torch

from sympow.integrations.vllm.pages import Part, keeps_state, page_of, step_on_pages
from sympow.layers import make_mixer
from tests.ops.contract import DEVICE

GPU = DEVICE == "cuda"
WIDTH, PAGES = (256, 9) if GPU else (16, 9)
KERNELS = {"impl": "triton", "n_kv_heads": 1}
MIXERS = {
    "power": ("power", KERNELS),
    "data-dependent rotation": ("power", {**KERNELS, "rotation": "data", "head_dim": 8, "p": 4 if GPU else 2}),
    "linear": ("linear", {}),
    "retnet": ("retnet", {}),
}
# Tokens that each request reads, step by step: chunks of prompts, decoding, and a request that begins later.
BATCHES = [
    {"a": 5, "b": 3},
    {"a": 1, "b": 4, "c": 4},
    {"c": 1, "a": 1, "b": 1},
    {"c": 20 if GPU else 7},
    {"b": 1, "c": 1},
]
TABLE = {"a": 6, "b": 2, "c": 3}


def pools_of(state):
    """The tensors of a state for all pages: one behind another in a page, and 64 bytes of room behind them."""
    page, tensors, at = page_of(state), list(state.tensors()), 0
    bytes_of_page = -(-sum(tensor.nbytes for tensor in tensors) // 64) * 64 + 64
    raw, pools = torch.full((PAGES * bytes_of_page,), 0x7F, dtype=torch.uint8, device=DEVICE), []
    for shape, dtype, tensor in zip(page.shapes, page.dtypes, tensors, strict=True):
        strides = (bytes_of_page // dtype.itemsize, *tensor.stride()[1:])
        pools.append(torch.as_strided(raw.view(dtype), (PAGES, *shape), strides, at // dtype.itemsize))
        at += tensor.nbytes
    return raw.view(PAGES, bytes_of_page), pools


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_pages_are_stepped_as_states_of_their_own(name):
    pytest.importorskip("triton", reason="needs triton")
    kind, options = MIXERS[name]
    mixer = make_mixer(kind, WIDTH, 2, options).to(DEVICE).eval()
    mixer.reset_parameters(generator=torch.Generator().manual_seed(0), std=0.2)
    assert keeps_state(mixer)
    first = mixer.init_state(1).with_all_room()
    raw, pools = pools_of(first)
    unused = [page for page in range(PAGES) if page not in TABLE.values()]
    states, read = {request: mixer.init_state(1) for request in TABLE}, dict.fromkeys(TABLE, 0)
    generator = torch.Generator().manual_seed(1)
    for batch in BATCHES:
        x = torch.randn(sum(batch.values()), WIDTH, generator=generator).to(DEVICE)
        expected, parts, at = [], {}, 0
        for request, length in batch.items():
            y, states[request] = mixer.step(x[None, at : at + length], states[request])
            expected.append(y[0])
            parts.setdefault(length, []).append((at, request))
            at += length
        found = step_on_pages(mixer, first, pools, x, [part(length, rows, read) for length, rows in parts.items()])
        for request, length in batch.items():
            read[request] += length
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert (raw[unused] == 0x7F).all() and (raw[:, -64:] == 0x7F).all()


def part(length, rows, read):
    starts = torch.tensor([start for start, _ in rows], device=DEVICE)
    pages = torch.tensor([TABLE[request] for _, request in rows], device=DEVICE)
    tokens = starts[:, None] + torch.arange(length, device=DEVICE)
    return Part(tokens, pages, torch.tensor([read[request] for _, request in rows], device=DEVICE))
