"""Steps on pages, laid out as vLLM lays out its cache, against steps on states of their own. This needs no vLLM.

On a GPU the kernels run on the pages, and steps of one token are replayed as CUDA graphs. Elsewhere the kernels run in
Triton's interpreter, and steps of one token read the same tensors as a graph.
"""

import pytest
import torch
from torch.nn import functional as F

from sympow.integrations.vllm.inputs import cached_heads, channels, input_state, step_input
from sympow.integrations.vllm.pages import DecodingPart, keeps_state, page_of, parts_of, step_on_pages
from sympow.layers import make_mixer
from sympow.layers.attention import BLOCK
from tests.ops.contract import DEVICE

GPU = DEVICE == "cuda"
WIDTH, PAGES = (256, 9) if GPU else (16, 9)
KERNELS = {"impl": "triton", "n_kv_heads": 1}
MIXERS = {
    "power": ("power", KERNELS),
    "data-dependent rotation": ("power", {**KERNELS, "rotation": "data", "head_dim": 8, "p": 4 if GPU else 2}),
    "linear": ("linear", {}),
    "retnet": ("retnet", {}),
    "delta rule": ("power_delta", {"n_kv_heads": 1}),
    "windows and delta rule": ("hybrid_heads", {"window": 6}),
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


def made(name, kind, options):
    mixer = make_mixer(kind, WIDTH, 2, options).to(DEVICE).eval()
    mixer.reset_parameters(generator=torch.Generator().manual_seed(0), std=0.2)
    return mixer


def pages_of(page):
    """The bytes of all pages, with some behind the tensors, and views of the tensors."""
    raw = torch.full((PAGES, page.size + 64), 0x7F, dtype=torch.int8, device=DEVICE)
    return raw, page.tensors(raw[:, : page.size])


def stepped(mixer):
    def step(x, state):
        y, after = mixer.step(x, state)
        return (y,), after

    return step


def assert_equal(found, expected):
    """Equal up to roundings. Batches of other sizes add up in another order, and the delta rule subtracts large terms
    that nearly cancel before a norm makes them large again: 1e-4 of the norm, where a wrong page would be all wrong."""
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def parts(batch, read):
    """The parts of a batch, of what vLLM tells: where requests start, their pages, and their lengths."""
    starts = [0]
    for length in batch.values():
        starts.append(starts[-1] + length)
    lengths = [read[request] + length for request, length in batch.items()]
    return parts_of(starts, *numbers(batch, lengths))


def numbers(batch, lengths):
    return (torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in ([TABLE[name] for name in batch], lengths))


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_pages_are_stepped_as_states_of_their_own(name):
    pytest.importorskip("triton", reason="needs triton")
    mixer = made(name, *MIXERS[name])
    assert keeps_state(mixer)
    first = mixer.init_state(1).with_all_room()
    raw, pages = pages_of(page_of(first))
    unused = [page for page in range(PAGES) if page not in TABLE.values()]
    states, read = {request: mixer.init_state(1) for request in TABLE}, dict.fromkeys(TABLE, 0)
    generator = torch.Generator().manual_seed(1)
    for batch in BATCHES:
        x = torch.randn(sum(batch.values()), WIDTH, generator=generator).to(DEVICE)
        expected, at = [], 0
        for request, length in batch.items():
            y, states[request] = mixer.step(x[None, at : at + length], states[request])
            expected.append(y[0])
            at += length
        found = torch.full_like(x, torch.nan)
        step_on_pages(stepped(mixer), first, pages, x, parts(batch, read), [found])
        for request, length in batch.items():
            read[request] += length
        assert_equal(found, torch.cat(expected))
    assert (raw[unused] == 0x7F).all() and (raw[:, -64:] == 0x7F).all()


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_steps_of_one_token_are_one_graph(name):
    """One graph serves batches of any requests, whose pages and lengths it reads from tensors that stay in place."""
    pytest.importorskip("triton", reason="needs triton")
    mixer, rows = made(name, *MIXERS[name]), 4
    first = mixer.init_state(1).with_all_room()
    raw, pages = pages_of(page_of(first))
    raw[0] = 0  # the page of rows that pad a batch, whose values have no meaning
    x, found, decoding = torch.zeros(rows, WIDTH, device=DEVICE), torch.zeros(rows, WIDTH, device=DEVICE), None
    decoding = DecodingPart(rows, x.device)
    part = decoding.of(*numbers({}, []), 0, rows)

    def run():
        step_on_pages(stepped(mixer), first, pages, x, [part], [found])

    run()
    if GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    states, read = {request: mixer.init_state(1) for request in TABLE}, dict.fromkeys(TABLE, 0)
    generator = torch.Generator().manual_seed(2)
    for batch in ("a", "ab", "cab", "bc", "c", "acb", "ca", "abc"):
        given = torch.randn(len(batch), WIDTH, generator=generator).to(DEVICE)
        expected = []
        for row, request in enumerate(batch):
            y, states[request] = mixer.step(given[None, row : row + 1], states[request])
            read[request] += 1
            expected.append(y[0])
        x[: len(batch)] = given
        decoding.of(*numbers(batch, [read[request] for request in batch]), len(batch), rows)
        run()
        assert_equal(found[: len(batch)], torch.cat(expected))
    unused = [page for page in range(1, PAGES) if page not in TABLE.values()]
    assert (raw[unused] == 0x7F).all() and (raw[:, page_of(first).size :][1:] == 0x7F).all()


@pytest.mark.parametrize("options", [{"gate": True, "rotation": "none", **BLOCK}, {"gate": True, "head_dim": 12}])
@torch.no_grad()
def test_gated_softmax_is_plain_attention_over_wider_keys(options):
    """What vLLM gets: queries, keys and values with the sums of the gates as channels, and pages for those sums."""
    mixer, time, cut = made("softmax", "softmax", options), 11, 4
    x = torch.randn(time, WIDTH, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    first, size = input_state(mixer), channels(mixer) + 8
    _, pages = pages_of(page_of(first))
    convolved = torch.empty_like(x)
    sums = x.new_empty(time, mixer.n_kv_heads, dtype=torch.float64)
    for start, stop in ((0, cut), (cut, time - 1), (time - 1, time)):
        found = parts({"a": stop - start}, {"a": start})
        outs = [convolved[start:stop], sums[start:stop]]
        step_on_pages(lambda x, state: step_input(mixer, x, state), first, pages, x[start:stop], found, outs)
    q, k, v = cached_heads(mixer, convolved, sums, torch.arange(time, device=DEVICE), size)
    q, k, v = (part.view(1, time, -1, size).transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=mixer.head_dim**-0.5)
    y = mixer.output(convolved[None], y.transpose(1, 2)[..., : mixer.value_dim])
    torch.testing.assert_close(y, mixer(x[None]), rtol=1e-4, atol=1e-5)
