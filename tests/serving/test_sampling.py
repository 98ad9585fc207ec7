"""Tokens of many rows are drawn at once, each as if its row were alone."""

import torch

from sympow.models.generation import sample
from sympow.serving import Sampling
from sympow.serving.sampling import Draws, draw

CPU = torch.device("cpu")
DIGITS = torch.finfo(torch.float32)
OPTIONS = (
    Sampling(1.0, seed=1),
    Sampling(0.0),
    Sampling(0.7, top_k=3, seed=2),
    Sampling(1.3, top_p=0.5, seed=3),
    Sampling(0.9, top_k=20, top_p=0.9, seed=2**62),
    Sampling(1e-46, seed=4),  # 0 in float32
    Sampling(5e-324, seed=5),
    Sampling(DIGITS.tiny / 4, seed=6),  # float32 cannot divide by it
    Sampling(DIGITS.tiny, seed=7),
)


def logits_of(step: int) -> torch.Tensor:
    return torch.randn(len(OPTIONS), 300, generator=torch.Generator().manual_seed(step)) * 3


def test_every_row_draws_what_it_draws_alone():
    draws = [Draws(each, CPU) for each in OPTIONS]
    alone = [torch.Generator().manual_seed(each.seed) for each in OPTIONS]
    for step in range(50):
        logits = logits_of(step)
        tokens = draw(logits, draws, [None] * len(draws)).tokens()
        for row, (each, generator) in enumerate(zip(OPTIONS, alone, strict=True)):
            options = {"temperature": each.temperature, "top_k": each.top_k, "top_p": each.top_p}
            assert tokens[row] == int(sample(logits[row : row + 1], **options, generator=generator))


def test_rows_without_a_use_draw_nothing_from_their_random_numbers():
    draws = [Draws(OPTIONS[0], CPU), Draws(OPTIONS[0], CPU)]
    before = draws[1].generator.get_state()
    draw(logits_of(0)[:2], [draws[0], None], [None, None])
    assert torch.equal(draws[1].generator.get_state(), before)
    assert not torch.equal(draws[0].generator.get_state(), before)


def test_a_row_that_is_not_finite_gives_no_token_and_the_others_theirs():
    logits = logits_of(0)
    draws = [Draws(OPTIONS[0], CPU) for _ in range(3)]
    whole = draw(logits[:3], [Draws(OPTIONS[0], CPU) for _ in range(3)], [None] * 3).tokens()
    logits[1, 7] = float("nan")
    assert draw(logits[:3], draws, [None] * 3).tokens() == [whole[0], None, whole[2]]
