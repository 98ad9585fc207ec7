import numpy as np
import pytest
import torch

from sympow.ops import PowerState


def some_state():
    return PowerState(torch.randn(2, 3, 10, 5), torch.randn(2, 3, 10), p=2, key_dim=4)


def test_size():
    state = PowerState.zeros(2, 3, 64, 64, p=2)
    assert state.nbytes == 2 * 3 * 2080 * 65 * 4
    assert state.value_dim == 64


def test_what_is_no_state():
    with pytest.raises(ValueError, match=r"a state of p = 16 and K = 64 needs .* of memory"):
        PowerState.zeros(1, 2, 64, 16, p=16)
    with pytest.raises(TypeError, match=r"s of a PowerState must be a torch\.Tensor; got list"):
        PowerState([1], torch.zeros(1, 2, 10), 2, 4)
    for key_dim in (4.0, "4", None, True):
        with pytest.raises(TypeError, match=f"key_dim of a PowerState must be an integer; got {key_dim!r}"):
            PowerState(torch.zeros(1, 2, 10, 3), torch.zeros(1, 2, 10), 2, key_dim)
    with pytest.raises(ValueError, match="one device; got s on cpu, z on meta"):
        PowerState(torch.zeros(1, 2, 10, 3), torch.zeros(1, 2, 10, device="meta"), 2, 4)
    assert PowerState.zeros(1, 2, 4, 3, p=np.int64(2)).s.shape == (1, 2, 10, 3)


def test_moves_and_detaches():
    state = some_state()
    assert state.to(torch.float64).s.dtype == torch.float64
    assert state.to("meta").z.device.type == "meta"
    copy = state.clone()
    copy.s.zero_()
    assert state.s.abs().max() > 0
    grown = PowerState(state.s.requires_grad_(), state.z, 2, 4)
    assert not grown.detach().s.requires_grad


def test_saves_and_loads(tmp_path):
    state = some_state()
    state.save(tmp_path / "state.pt")
    loaded = PowerState.load(tmp_path / "state.pt")
    assert torch.equal(loaded.s, state.s) and torch.equal(loaded.z, state.z)
    assert (loaded.p, loaded.key_dim) == (2, 4)
    PowerState(state.s, state.z, 2, np.int64(4)).save(tmp_path / "state.pt")
    assert type(PowerState.load(tmp_path / "state.pt").key_dim) is int


def test_files_that_are_no_state(tmp_path):
    path = tmp_path / "state.pt"
    with pytest.raises(FileNotFoundError, match=r"no PowerState file at .*state\.pt"):
        PowerState.load(path)
    some_state().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a readable PowerState file"):
        PowerState.load(path)
    some_state().save(path)
    content = torch.load(path)
    for change, message in (
        ({"p": 10**14}, "holds no PowerState: a PowerState of p=100000000000000"),
        ({"p": None}, "holds no PowerState: "),
        ({"s": [1]}, "holds no PowerState: "),
        ({"s": content["s"].half()}, "holds no PowerState: a PowerState is float32"),
    ):
        torch.save(content | change, path)
        with pytest.raises(ValueError, match=message):
            PowerState.load(path)
    torch.save({name: value for name, value in content.items() if name != "z"}, path)
    with pytest.raises(ValueError, match="holds no PowerState: it has no 'z'"):
        PowerState.load(path)
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="is not a PowerState file"):
        PowerState.load(path)
