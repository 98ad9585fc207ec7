"""Learning runs: each is one of a kind, trained and kept once; the table, and what pages quote of it."""

from dataclasses import replace
from functools import partial
from statistics import mean, stdev

import pytest

from benchmarks import bigram, learning
from benchmarks.bigram import KERNEL, not_learned
from benchmarks.common import measure
from benchmarks.common.measure import read
from benchmarks.context_scaling.grid import DOCUMENT, LONG, SCALES, SHORT
from benchmarks.context_scaling.work import whole_matrices
from benchmarks.pages import learning_tables
from benchmarks.tables import ROOT
from sympow.models import LanguageModel
from sympow.recall.results import group, read_rows
from sympow.recipes import load_recipe
from sympow.sweeps import run_jobs
from sympow.training import optimizer
from tests.benchmarks.corpora import random_corpus

LENGTH = DOCUMENT // SCALES["toy"].shrink


@pytest.fixture
def corpus(tmp_path):
    return random_corpus(tmp_path, 4, 3, LENGTH)


def test_every_run_is_one_of_a_kind_and_can_be_made(tmp_path):
    runs = list(dict.fromkeys(run for grid in learning.GRIDS.values() for run in grid))
    assert len({run.name for run in runs}) == len(runs) > 50
    for variant in {run.variant for run in runs}:
        run = next(run for run in runs if run.variant == variant)
        config = run.config(SCALES["full"], tmp_path, "cpu")
        assert (config.training.optimizer, config.training.learning_rate) == (run.optimizer, run.learning_rate)
    default = load_recipe("scaling:power").training  # the recipes have what won
    assert (default.optimizer, default.learning_rate) == ("muon", learning.BEST)


def test_a_run_can_take_fused_projections_whole(tmp_path):
    (run,) = [run for run in learning.GRIDS["whole"] if (run.variant, run.seed) == ("power_delta", 0)]
    config = run.config(SCALES["toy"], tmp_path, "cpu")
    model = LanguageModel(replace(config.model, d_model=64, n_heads=1), seed=0)
    split = optimizer.muon_weights(model)
    with whole_matrices(run):
        whole = optimizer.muon_weights(model)
    assert config.training.optimizer == "muon" and optimizer.muon_weights(model) == split
    assert [rows for _, rows in whole] == [[sum(rows)] for _, rows in split] != [rows for _, rows in split]


def test_runs_are_trained_once_and_merged(corpus, tmp_path, call, monkeypatch, capsys):
    monkeypatch.setattr(learning, "run_jobs", partial(run_jobs, executor=None))
    monkeypatch.setattr(measure, "commit", lambda: "123456789012")
    monkeypatch.setattr(learning, "TABLE", tmp_path / "committed" / "learning.csv")
    monkeypatch.setattr(learning, "POSITIONS", tmp_path / "committed" / "learning_positions.csv")
    monkeypatch.setattr(learning, "USE", tmp_path / "committed" / "learning_context.csv")
    monkeypatch.setattr(learning, "RESULTS", tmp_path / "committed")
    names = "softmax_gate:1024:4e-3:0:30146560:muon,power_delta:1024:4e-3:0:30146560:muon:2"
    where = ("--corpus", corpus, "--out", tmp_path / "out", "--scale", "toy", "--device", "cpu")
    words = ("run", "--names", names, *where, "--measures", "--keep", tmp_path / "kept")
    assert call(learning, *words) == 0
    assert call(learning, "merge", "--from", tmp_path / "out") == 0
    rows = {row["variant"]: row for row in read_rows(tmp_path / "committed" / "learning.csv", ("commit", "corpus"))}
    assert rows["power_delta"]["muon_rate"] == 2
    assert rows["power_delta"]["gate_softmax_loss"] == rows["softmax_gate"]["held_out_loss"]
    use = read(tmp_path / "committed" / "learning_context.csv")
    assert {row["run"] for row in use} == {path.name for path in (tmp_path / "kept").iterdir()}
    assert {row["measure"] for row in use} == {"cut", "position", "hits", "copy", "recalled"}
    capsys.readouterr()
    assert call(learning, "merge", "--from", tmp_path / "out") == 0
    assert capsys.readouterr().out == "0 runs added, 2 replaced\n"
    assert read(tmp_path / "committed" / "learning_context.csv") == use
    assert call(learning, *words) == 0
    assert "0 of 2 runs to do" in capsys.readouterr().out
    assert call(learning, *words, "--again", "--minutes", 0) == 0
    assert "2 of 2 runs to do" in capsys.readouterr().out
    (tmp_path / "committed" / "learning_context.csv").unlink()
    assert call(learning, *words[:-3], "--minutes", 0) == 0
    assert call(learning, *words, "--minutes", 0) == 0
    said = capsys.readouterr().out
    assert "0 of 2 runs to do" in said and "2 of 2 runs to do" in said
    assert call(learning, "run", "--studies", "powers", *where, "--minutes", 0) == 0
    assert capsys.readouterr().out == "12 of 12 runs to do\n"
    assert call(learning, "run", "--grids", "none", "--corpus", corpus, "--out", tmp_path / "out") == 2
    assert "error: a grid is one of rates, adamw" in capsys.readouterr().err


def test_a_plan_says_how_long_runs_take(call, monkeypatch, tmp_path, capsys):
    assert call(learning, "plan", "--grids", "rates") == 0
    assert capsys.readouterr().out.startswith("0 runs: ")
    monkeypatch.setattr(learning, "USE", tmp_path / "none.csv")
    assert call(learning, "plan", "--grids", "rates", "--measures") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(learning.GRIDS["rates"]) + 1
    with monkeypatch.context() as patch:
        patch.setattr(learning, "TABLE", tmp_path / "none.csv")
        assert call(learning, "plan", "--grids", "slow", "--gpus", "4", "--workers", "8") == 0
    *runs, total = capsys.readouterr().out.splitlines()
    assert len(runs) == 6 and all(" s  " in line for line in runs) and total.startswith("6 runs: ")
    known = next(row for row in read(learning.TABLE) if row["variant"] == "power" and row["context"] == 4096)
    done = learning.LearningRun("power", 4096, known["tokens"])
    fastest = done.tokens / (learning.expected(done) - learning.cost.OVERHEAD)
    assert fastest >= known["tokens_per_second"]
    assert learning.expected(replace(done, tokens=2 * done.tokens)) < 2 * learning.expected(done)


def row(variant: str, loss: float, rate: float = 4e-3, seed: int = 0) -> dict:
    return {
        "variant": variant,
        "optimizer": "muon",
        "context": 1024,
        "tokens": 30_000_000,
        "learning_rate": rate,
        "seed": seed,
        "held_out_loss": loss,
        "gain": 0.5,
        "status": "done",
        "scale": "full",
        "size": None,
        "corpus": "a",
        "processor": "GPU",
    }


def test_the_table_has_the_best_rate_of_most_seeds():
    rows = [row("softmax_gate", 2.0), row("softmax_gate", 2.1, seed=1), row("power", 2.2), row("power", 2.2, seed=1),
            row("power", 1.0, rate=8e-3), row("power_delta+beta=1", 2.5), row("power_delta", 2.25)]  # fmt: skip
    table = learning_tables.learning_table(rows)
    assert "| power attention, p = 2 | muon | 0.004 | 2 | 2.200 | 1.074 [1.048, 1.100] |" in table
    assert "| delta rule, p = 2 | muon | 0.004 | 1 | 2.250 | 1.125 (one run) |" in table
    assert "| beta=1 | 1,024 | 30M | 0.004 | 0 | 2.500 | +0.250 |" in table
    table = learning_tables.learning_table([*rows, row("power", 3.0) | {"corpus": "b"}, rows[0] | {"size": "small"}])
    first, second = table.split("Corpus: b.")
    assert "| 5.000 (not learned) |" in learning_tables.learning_table([row("power", 5.0)])
    assert first.startswith("Corpus: a.") and "| 3.000 | no pair |" in second
    assert "| softmax attention, gate, 85M block | muon | 0.004 | 1 | 2.000 | 1.000 (one run) |" in first
    assert "| beta=1 | 1,024 | 30M | 0.004 | 0 | 2.500 | +0.250 |" in second  # of the corpus of most runs
    other = row("power_delta", 1.0) | {"corpus": "b"}
    assert "| beta=1 | 1,024 | 30M | 0.004 | 0 | 2.500 | +0.250 |" in learning_tables.learning_table([other, *rows])


def test_each_corpus_has_a_loss_from_which_on_nothing_is_learned():
    losses = {row["corpus"]: row["loss"] for row in read(bigram.TABLE)}
    assert len(losses) == 2 and not_learned() == losses[KERNEL] == not_learned("of no row")
    rows = [row("power", loss) | {"corpus": name} for name, loss in losses.items()]
    for name, loss in losses.items():
        assert not_learned(name) == loss
        shown = [learning_tables.learning_table([row("power", loss + more) | {"corpus": name}]) for more in (0, 0.01)]
        assert ["(not learned)" in text for text in shown] == [False, True]
    assert "(not learned)" not in learning_tables.learning_table(rows)


def test_the_papers_models_have_their_best_context_loss():
    rows = [row("published_p2", 2.0) | {"best_loss": 1.75}, row("published_p2", 2.5, seed=1) | {"best_loss": 1.25},
            row("conformal_p2", 1.5) | {"best_loss": 1.0, "gain": None}, row("power", 1.0) | {"optimizer": "adamw"},
            row("softmax", 3.0) | {"best_loss": 2.0, "context": 4096}]  # fmt: skip
    lines = learning_tables.papers_table(rows).splitlines()
    assert lines[2:] == [
        "| 1,024 | 30M | p = 2, no gate | 0.004 | 2 | 2.250 [2.000, 2.500] | 1.500 [1.250, 1.750] | "
        "0.500 [0.500, 0.500] |",
        "| 1,024 | 30M | p = 2, gate and learned rotation | 0.004 | 1 | 1.500 | 1.000 |  |",
        "| 4,096 | 30M | softmax attention | 0.004 | 1 | 3.000 | 2.000 | 0.500 |",
    ]


def test_the_page_of_sources_quotes_table_4_of_scra():
    """Best-context losses of states of equal size, and the difference that decides nothing."""
    wanted = learning.GRIDS["scra_states"]
    keys = {(run.variant, run.context, run.tokens, run.learning_rate, run.optimizer, run.seed) for run in wanted}
    names = ("variant", "context", "tokens", "learning_rate", "optimizer", "seed")
    rows = [row for row in read_rows(learning.TABLE, ("corpus",)) if tuple(row[name] for name in names) in keys]
    best = {key: [row["best_loss"] for row in same] for (key,), same in group(rows, "variant").items()}
    assert [len(losses) for losses in best.values()] == [3, 3, 3]
    window, power, softmax = (mean(best[name]) for name in ("window", "power", "softmax"))
    pairs = [own - other for own, other in zip(best["power"], best["softmax"], strict=True)]
    spread = 4.303 * stdev(pairs) / 3**0.5
    (row,) = [line for line in (ROOT / "docs" / "sources.md").read_text("utf-8").splitlines()
              if line.startswith("| Table 4 | p = 2, a window")]  # fmt: skip
    assert f"{window:.3f} nats against {power:.3f} and {softmax:.3f}" in row and "equal time" not in row
    assert f"{-mean(pairs):.3f} ± {spread:.3f} nats below softmax attention" in row and abs(mean(pairs)) < spread


def test_mixers_in_the_body_of_rwkv7_are_compared_with_equal_norms_of_heads(tmp_path):
    """[SCRA], Figures 1, 3, 4 and 9. Linear attention has a gate, as there."""
    mixers = {}
    for run in (run for name in ("windows", "lengths", "bodies") for run in learning.GRIDS[f"scra_{name}"]):
        (mixers[run.variant], *_) = run.config(SCALES["full"], tmp_path, "cpu").model.mixers
    norms = {name: mixer.options["head_norm"] for name, mixer in mixers.items() if name != "body_rwkv7"}
    assert len(norms) == 5 and all(norms.values())
    assert mixers["body_linear"].options["p"] == 1 and mixers["body_linear"].options.get("gate", True)
    assert mixers["body_window32+head_norm=true"].options["window"] == 32


def test_the_powers_as_published_are_compared_at_their_best_rates():
    rows = [row("softmax_plain", 2.0), row("softmax_plain", 2.5, rate=8e-3), row("published_p2", 3.0, rate=8e-3),
            row("published_p2", 1.0, seed=1), row("power", 1.0)]  # fmt: skip
    rows = [each | {"context": 4096, "tokens": SHORT} for each in rows]
    lines = learning_tables.powers_table([*rows, rows[0] | {"held_out_loss": 1.0, "tokens": LONG}]).splitlines()
    assert lines[0] == "| model | rate 0.004 | rate 0.008 | lowest, times softmax |"
    assert lines[2:] == ["| softmax attention, without the block | 2.000 | 2.500 | 1.00 |",
                         "| p = 2, no gate |  | 3.000 | 1.50 |"]  # fmt: skip


def test_pages_quote_the_committed_rows():
    rows = read_rows(learning.TABLE, ("commit", "corpus"))
    rows = [row for row in rows if row["optimizer"] == "muon" and row["learning_rate"] == learning.BEST
            and row["corpus"] == KERNEL]  # fmt: skip

    def ratio(variant: str, context: int, tokens: int) -> str:
        same = group([row for row in rows if (row["context"], row["tokens"]) == (context, tokens)], "variant", "seed")
        found = [x["held_out_loss"] / same["softmax_gate", seed][0]["held_out_loss"]
                 for (name, seed), (x, *_) in same.items()
                 if name == variant and ("softmax_gate", seed) in same]  # fmt: skip
        return f"{mean(found):.2f}"

    short, middle = 30_146_560, 100_139_008
    power = [ratio("power", context, short) for context in (1024, 4096)]
    delta = [ratio("power_delta", context, short) for context in (1024, 4096)]
    names = ("window", "power_delta", "power", "hybrid_delta_gate", "hybrid_heads_delta")
    window, delta_later, later, hybrid, heads = (ratio(variant, 4096, middle) for variant in names)
    names = ('heads_delta+options={"offset":0.09}', "heads_delta")
    offset, none = (ratio(name, 4096, LONG) for name in names)
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    guide = " ".join((ROOT / "docs" / "guides" / "choosing.md").read_text("utf-8").split())
    words = "times that of softmax attention with the same gate at 1,024 and 4,096 tokens"
    assert f"the loss of p = 2 is {power[0]} and {power[1]} {words}" in readme
    assert f"(`PowerDeltaAttention`) {delta[0]} and {delta[1]} times." in readme
    equal = ratio("window+window=2112", 4096, middle)
    for cells in (
        f"`scaling:window model.mixers.0.options.window=2112` | constant | {equal} | |",
        f"`scaling:hybrid_heads_delta` | grows in one layer | {heads} |",
        f"`scaling:hybrid_delta_gate` | grows in one layer | {hybrid} |",
        f"`scaling:window` | constant | {window} | {ratio('window', 4096, LONG)}* |",
        f"`scaling:power_delta` | constant | {delta_later} | {ratio('power_delta', 4096, LONG)}* |",
        f"`scaling:power` | constant | {later} | |",
        f"`scaling:heads_delta` | constant | {ratio('heads_delta', 4096, middle)}* | {none}* |",
        f"`constant_state` below | constant | | {offset} |",
    ):
        assert cells in guide
    long = [ratio(variant, 16_384, middle) for variant in ("power_delta", "window")]
    assert float(long[0]) < float(long[1])  # "at 16,384 tokens the delta rule leads the window"

    def less(
        variant: str, base: str, context: int = 4096, tokens: int = short, seeds: tuple[int, ...] = learning.SEEDS
    ) -> list[float]:
        """The losses of a variant less those of the base, of the same seeds."""
        same = group([row for row in rows if (row["context"], row["tokens"]) == (context, tokens)], "variant", "seed")
        pairs = [(same[variant, seed][0], same[base, seed][0]) for seed in seeds]
        return [own["held_out_loss"] - other["held_out_loss"] for own, other in pairs]

    page = " ".join((ROOT / "docs" / "results" / "learning.md").read_text("utf-8").split())
    halves = less('heads_delta+options={"offset":0.09}', "heads_delta")
    spread = 4.303 * stdev(halves) / 3**0.5  # Student's t of two degrees of freedom
    assert f"is lower in all three pairs, by {-mean(halves):.3f} ± {spread:.3f} nats" in page and max(halves) < 0
    whole, at_1024 = (less("power_delta+offset=0.09", "power_delta", context) for context in (4096, 1024))
    assert f"the difference is {mean(whole):.3f} at 4,096 tokens (three pairs, from {min(whole):.3f} to" in page
    assert f"{mean(at_1024):.3f} at 1,024 (from {min(at_1024):.3f} to +{max(at_1024):.3f})" in page
    in_hybrid = less('hybrid_heads_delta+hybrid_heads.options={"offset":0.09}', "hybrid_heads_delta", tokens=middle)
    pairs = f"three pairs, from {min(in_hybrid):.3f} to +{max(in_hybrid):.3f}"
    assert f"{mean(in_hybrid):.3f} nats after 100 million tokens ({pairs})" in page
    found = [[row["held_out_loss"] for row in rows if (row["variant"], row["tokens"]) == (name, LONG)]
             for name in (*names, "softmax_gate")]  # fmt: skip
    assert f"it is {found[0][0]:.3f} in place of {found[1][0]:.3f} nats in the one pair" in page
    assert f"attention, {mean(found[0]):.3f} against {mean(found[2]):.3f} nats" in page
    gates = less("power+key_gate=16", "power", 1024, seeds=(0, 1))
    assert f"lowers the loss at 1,024 tokens by {-gates[0]:.3f} and {-gates[1]:.3f} nats (two pairs)" in page
    fixed = less("power_delta+beta=0.5", "power_delta")
    assert f"by {-mean(fixed):.3f} nats (from {-max(fixed):.3f} to {-min(fixed):.3f})" in page
