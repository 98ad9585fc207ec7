"""The benchmarks of training on a very small model on the CPU: what is checked before it is timed, and the rows."""

import dataclasses

import pytest
import torch

from benchmarks import training
from benchmarks.common.chains import Chains
from benchmarks.common.measure import read, write

SHAPE = training.Shape("nano", vocabulary=29, context=16, rows=4, micro_batch=2)
CPU = torch.device("cpu")


def command(call, file, *words: str) -> list[dict]:
    options = ["--device", "cpu", "--preset", "nano", "--vocabulary", "29", "--tokens", "32", "--steps", "1"]
    call(training, *options, *words, "--csv", file)
    return read(file)


@pytest.mark.parametrize("words", [["--contexts", "0"], ["--steps", "0"], ["--micro-batch", "-1"], ["--csv", "."]])
def test_wrong_options_are_refused_before_anything_is_timed(words, call, monkeypatch, capsys):
    monkeypatch.setattr(training, "measure", None)
    with pytest.raises(SystemExit):
        call(training, "--device", "cpu", "--csv", "rows.csv", *words)
    assert f"error: argument {words[0]}: " in capsys.readouterr().err


def test_rows(tmp_path, call, capsys):
    file = tmp_path / "rows.csv"
    words = ["--contexts", "32", "16", "--mixers", "softmax", "power", "--modes", "eager", "checkpoint"]
    rows = command(call, file, *words)
    assert [(row["context"], row["rows"], row["mixer"], row["mode"]) for row in rows] == [
        (context, 32 // context, mixer, mode)
        for context in (32, 16)
        for mixer in ("softmax", "power")
        for mode in ("eager", "checkpoint")
    ]
    for row in rows:
        assert row["ms"] > 0 and row["tokens_per_second"] == pytest.approx(32e3 / row["ms"], rel=0.01)
        assert row["flops_per_token"] > 0 and row["mfu"] is None and row["peak_gib"] is None
        assert row["precision_error"] < training.ALLOWED and row["mode_error"] < 1e-5
    assert rows[0]["ratio"] == 1 and rows[2]["ratio"] == pytest.approx(rows[0]["ms"] / rows[2]["ms"], rel=0.01)
    assert len(capsys.readouterr().out.splitlines()) == 8

    known = rows[:7]
    write(file, known)
    assert command(call, file, *words)[:7] == known  # a run that was stopped goes on
    assert "checkpoint" in capsys.readouterr().out


def test_optimizers_are_compared_with_adamw(tmp_path, call, capsys):
    """In a file whose earlier rows do not name their optimizer."""
    file = tmp_path / "rows.csv"
    words = ["--contexts", "16", "--mixers", "power", "--modes", "eager"]
    (known,) = command(call, file, *words)
    del known["optimizer"]
    write(file, [known])
    adamw, muon = command(call, file, *words, "--optimizers", "adamw", "muon")
    assert adamw["ms"] == known["ms"] and (adamw["optimizer"], muon["optimizer"]) == ("adamw", "muon")
    assert muon["over_adamw"] == pytest.approx(adamw["ms"] / muon["ms"], rel=0.01) and muon["loss"] == adamw["loss"]
    assert f"{muon['over_adamw']:.2f}x AdamW" in capsys.readouterr().out.splitlines()[-1]


def test_the_step_is_that_of_training_and_its_passes_add_up():
    whole = dataclasses.replace(SHAPE, micro_batch=4)
    one, two = (training.take_steps(shape, "power", "eager", CPU, 1) for shape in (whole, SHAPE))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4) and len(one["seconds"]) == 1
    assert one["flops"] > 6 * 29 * 64


@pytest.mark.parametrize(("host", "device", "expected"), [(2, 5, [5, 5, 5, 5]), (5, 2, [10, 5, 5, 5])])
def test_a_step_takes_the_longer_of_the_times_of_host_and_device(monkeypatch, host, device, expected):
    """Also the last step. On a clock: the host launches a step, and the device works behind it."""
    now, idle = [0.0], [0.0]

    class Numbers:
        def __init__(self, step: int, done: float):
            self.step, self.done = step, done

        def read(self):
            now[0] = max(now[0], self.done)
            return float(self.step), 1.0, 3

    def launch(step: int) -> Numbers:
        idle[0] = max(idle[0], now[0]) + device  # the first kernel is launched at once
        now[0] += host
        return Numbers(step, max(idle[0], now[0]))

    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    seconds, numbers = training.timed_steps(launch, 4)
    assert seconds == expected and numbers == [(step, 1.0) for step in range(4)]
    assert now[0] >= idle[0], "the device still works"


def test_a_wrong_step_is_not_timed(tmp_path, call, monkeypatch, capsys):
    """One that does not come to the plain one, or to float32; and the others go on."""
    exact = training.take_steps

    def wrong(shape, mixer, mode, device, count):
        taken = exact(shape, mixer, mode, device, count)
        return taken | {"loss": taken["loss"] * (1.1 if mode == "checkpoint" else 1)}

    monkeypatch.setattr(training, "take_steps", wrong)
    words = ["--contexts", "16", "--mixers", "power", "--modes", "checkpoint", "eager"]
    bad, good = command(call, tmp_path / "rows.csv", *words)
    assert bad["error"].startswith("RuntimeError: power, checkpoint: the first step is 1.0e-01 from the plain one")
    assert bad["ms"] is None and good["ms"] > 0 and "not timed" in capsys.readouterr().out
    monkeypatch.setattr(training, "check_precision", lambda *_: float("nan"))
    with pytest.raises(RuntimeError, match="bfloat16 is nan from float32"):
        training.measure(SHAPE, "power", "eager", CPU, 1, [])


def test_chains():
    """A row's alphabet and transitions are its own, and each token has at most so many successors."""
    chains = Chains(context=300, rows=2, vocabulary=7, alphabet=5, successors=2)
    batch = chains[3]
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1]) and batch.tokens.shape == (2, 300)
    rows = zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
    tables = [set(zip(*row, strict=True)) for row in rows]
    assert all(len({b for a, b in table if a == token}) <= 2 for table in tables for token in range(7))
    assert all(len({b for _, b in table}) <= 5 for table in tables)
    assert tables[0] != tables[1] and torch.equal(chains[3].tokens, batch.tokens)
    assert not torch.equal(chains[4].tokens, batch.tokens)
    assert torch.equal(dataclasses.replace(chains, rows=1)[7].tokens[0], batch.tokens[1])
    last = Chains(context=1000, rows=64, alphabet=16)[0].tokens[:, -500:]
    assert all(len(set(row)) > 8 for row in last.tolist()), "a row goes round in few letters"
    chains.check_state(chains.state())
    with pytest.raises(ValueError, match="the run was made on other chains"):
        Chains(context=300, rows=2).check_state(chains.state())
