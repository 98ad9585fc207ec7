"""State-space models against the recurrences that define them, written out."""

import math

import torch
from torch.nn import functional as F

from sympow.layers import MIXERS
from sympow.layers.zoology.state_space import DiagonalSSM
from tests.draws import normal


def ssm(channels: int, state_dim: int) -> DiagonalSSM:
    model = DiagonalSSM(channels, state_dim).double()
    model.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.log_dt += 2  # so that 30 tokens are long
    return model


def bilinear(model: DiagonalSSM, channel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, c of one channel with all N states, conjugates included, by a linear solve."""
    own = model.log_decay.ndim == 2  # each channel has its own A and B
    decay, frequency, b = (w[channel] if own else w for w in (model.log_decay, model.frequency, model.b))
    half = torch.complex(-decay.exp(), frequency)
    big_a = torch.diag(torch.cat([half, half.conj()]))
    b, c = (torch.cat([part, part.conj()]) for part in map(torch.view_as_complex, (b, model.c[channel])))
    dt, eye = model.log_dt[channel].exp(), torch.eye(model.state_dim)
    inverse = torch.linalg.inv(eye - dt / 2 * big_a)
    return inverse @ (eye + dt / 2 * big_a), dt * inverse @ b, c


def test_convolution_is_the_recurrence_of_the_whole_state():
    model, u = ssm(2, 6), normal(1, 30, 2, 1)
    y = model(u)
    for channel in range(2):
        a, b, c = bilinear(model, channel)
        x = torch.zeros(6, dtype=torch.complex128)
        for t in range(30):
            x = a @ x + b * u[0, t, channel, 0]
            torch.testing.assert_close((c @ x).real, y[0, t, channel, 0])
            assert abs((c @ x).imag) < 1e-12


def test_s4d_lin_is_how_it_starts():
    model = DiagonalSSM(500, 8)
    model.reset_parameters(torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.frequency, math.pi * torch.arange(4.0))
    torch.testing.assert_close(model.log_decay.exp(), torch.full((4,), 0.5))
    assert -6.91 < model.log_dt.min() < -6.8 and -2.4 < model.log_dt.max() < -2.30
    assert abs(model.c.square().sum(-1).mean() - 1) < 0.1


def test_liquid_s4_is_its_recurrence_to_second_order():
    mixer = MIXERS["liquid_s4"](2, 1, state_dim=4).double()
    mixer.ssm.load_state_dict(ssm(2, 4).state_dict())
    x = normal(1, 12, 2)
    expected = torch.empty_like(x)
    for channel in range(2):
        a, b, c = bilinear(mixer.ssm, channel)
        power = [torch.linalg.matrix_power(a, n) for n in range(12)]
        u = x[0, :, channel].to(a.dtype)
        for t in range(12):
            first = sum(c @ power[t - i] @ b * u[i] for i in range(t + 1))
            # The transition of token j is b u_j in place of a, those of the others stay.
            pairs = [(i, j) for j in range(t + 1) for i in range(j)]
            second = sum(c @ power[t - j] @ (b * u[j] * (power[j - 1 - i] @ b * u[i])) for i, j in pairs)
            expected[0, t, channel] = (first + second).real
    torch.testing.assert_close(mixer(x), F.glu(mixer.out(F.gelu(expected + mixer.skip * x)), dim=-1))


def test_h3_is_two_state_space_models():
    mixer = MIXERS["h3"](6, 1, state_dim=4, head_dim=2).double()
    mixer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    assert mixer.shift.bias is None and mixer.diagonal.frequency.shape == (3, 2)
    with torch.no_grad():  # channels start with the same A and B
        for weight in (mixer.diagonal.log_decay, mixer.diagonal.frequency, mixer.diagonal.b):
            weight += normal(*weight.shape, seed=1)
    x = normal(1, 9, 6)
    q, k, v = mixer.qkv(x)[0].chunk(3, dim=-1)
    taps = mixer.shift.weight.T.flip(0)
    shifted = torch.stack([sum(taps[s] * k[t - s] for s in range(min(4, t + 1))) for t in range(9)])
    rows = []
    for t in range(9):
        heads = []
        for head in range(3):
            a, b, c = bilinear(mixer.diagonal, head)
            part = slice(2 * head, 2 * head + 2)
            memory = mixer.skip[head] * torch.outer(shifted[t, part], v[t, part])
            for s in range(t + 1):
                weight = (c @ torch.linalg.matrix_power(a, t - s) @ b).real
                memory = memory + weight * torch.outer(shifted[s, part], v[s, part])
            heads.append(q[t, part] @ memory)
        rows.append(torch.cat(heads))
    torch.testing.assert_close(mixer(x)[0], mixer.out(torch.stack(rows)))
