"""`check_contract` passes every mixer of the package, and names what a mixer of another one breaks."""

import pytest
import torch

from sympow.layers import ContractError, SoftmaxAttention, check_contract
from tests.layers.contract import CASES, make


@pytest.mark.parametrize("case", CASES)
def test_the_mixers_here_keep_the_contract(case):
    check_contract(make(case), tokens=13)


class LooksAhead(SoftmaxAttention):
    def forward(self, x, *, cu_seqlens=None, **extras):
        return super().forward(x.roll(-1, 1), cu_seqlens=cu_seqlens, **extras)


class MixesDocuments(SoftmaxAttention):
    def forward(self, x, *, cu_seqlens=None, **extras):
        return super().forward(x, **extras)


class Forgets(SoftmaxAttention):
    def step(self, x, state, **extras):
        return super().step(x, self.init_state(x.shape[0]), **extras)


class Miscounts(SoftmaxAttention):
    def state_size(self, context):
        return super().state_size(context) + 1


class Remembers(SoftmaxAttention):
    def try_step(self, x, state, **extras):
        y, after = super().try_step(x, state, **extras)
        return y, lambda n: after(x.shape[1])


class Shortens(SoftmaxAttention):
    def forward(self, x, *, cu_seqlens=None, **extras):
        return super().forward(x, cu_seqlens=cu_seqlens, **extras)[:, 1:]


class Overflows(SoftmaxAttention):
    def forward(self, x, *, cu_seqlens=None, **extras):
        return super().forward(x, cu_seqlens=cu_seqlens, **extras) / 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LooksAhead, r"^LooksAhead: the output for packed documents differs by|an output before a token that changed"),
        (MixesDocuments, "^MixesDocuments: the output for packed documents differs by"),
        (Forgets, r"^Forgets: the output of \d+ steps differs by"),
        (Miscounts, r"^Miscounts: state_size says [\d,]+ elements for each sequence after 37 tokens, the state has"),
        (Remembers, "^Remembers: a step after 0 of 5 tokens of try_step differs by"),
        (Shortens, r"^Shortens: expected finite outputs \[2, 37, 24\] of torch.float64, got \[2, 36, 24\] of"),
        (Overflows, "^Overflows: expected finite outputs .* not all finite$"),
    ],
)
def test_what_a_mixer_breaks_is_named(kind, message):
    torch.manual_seed(0)
    mixer = kind(24, 4)
    with pytest.raises(ContractError, match=message):
        check_contract(mixer)


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="tokens must be at least 8; got 7"):
        check_contract(SoftmaxAttention(24, 4), tokens=7)
