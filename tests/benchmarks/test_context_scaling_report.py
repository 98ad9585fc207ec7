"""The page of context scaling: numbers of made-up rows with known answers, and sentences that follow from the rows."""

import math
from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.bigram import KERNEL, not_learned
from benchmarks.common.intervals import Interval, interval
from benchmarks.common.measure import known
from benchmarks.common.measure import write as write_rows
from benchmarks.context_scaling import __main__ as program
from benchmarks.context_scaling import tables
from benchmarks.context_scaling.claims import claims, judged
from benchmarks.context_scaling.found import Found, pick, runs_of
from benchmarks.context_scaling.grid import DOCUMENT, LONG, MIDDLE, SHORT, Run
from benchmarks.context_scaling.labels import LABELS
from benchmarks.context_scaling.studies import STUDIES
from benchmarks.learning import COLUMNS, LearningRun, run_of
from benchmarks.pages import context_tables, papers_figures
from benchmarks.pages.learning_tables import POWERS
from benchmarks.tables import RESULTS, ROOT
from sympow.recall import write_results

COMMITTED = RESULTS / "context_scaling"
PAGE = ROOT / "docs" / "results" / "context-scaling.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())


def write(folder, *runs: tuple[Run, str, float]) -> Found:
    """Returns what is found where these runs are finished on these versions of the corpus with these losses."""
    rows = [vars(run) | {"status": "done", "corpus": corpus, "held_out_loss": loss, "best_loss": loss - 0.1,
                         "gain": 0.25} for run, corpus, loss in runs]  # fmt: skip
    write_results(folder / "runs.csv", rows)
    return Found(folder)


def test_runs_are_paired_by_corpus_and_seed(tmp_path):
    """Only two pairs count: that of seed 0 on "a" and that of seed 1 on "b"."""
    power, softmax = pick("bars_4096", "power"), pick("bars_4096", "softmax")
    later = [replace(run, seed=1) for run in (power, softmax)]
    found = write(tmp_path, (power, "a", 3.0), (softmax, "a", 2.0), (later[0], "b", 3.5), (later[1], "b", 2.8),
                  (power, "b", 9.0), (later[1], "a", 1.0))  # fmt: skip
    difference, ratio = found.difference(power, softmax), found.ratio(power, softmax)
    assert (difference.mean, difference.count) == (pytest.approx((1.0 + 0.7) / 2), 2)
    assert (ratio.mean, ratio.count) == (pytest.approx((1.5 + 1.25) / 2), 2)
    assert found.mean(power, "held_out_loss") == interval([3.0, 9.0, 3.5])  # by corpus and seed
    (line,) = lines(tables.comparison(found, "bars_4096", 5.0), "4,096 tokens", "p = 2, 0.002")
    assert line.endswith(" | 2 |") and " | +0.850 ± " in line and "(not learned)" in line


def test_runs_without_a_pair_are_shown_and_not_compared(tmp_path):
    power, softmax, gate = (pick("controls", each, context=4096) for each in ("power", "softmax", "softmax_gate"))
    found = write(tmp_path, (power, "a", 3.0), (softmax, "b", 2.0), (gate, "b", 1.9))
    assert found.difference(power, softmax) is None
    (line,) = lines(tables.comparison(found, "controls", 4.0), "4,096 tokens", "p = 2, 0.002")
    assert line == "| 4,096 tokens | p = 2, 0.002 | 3.000 |  |  | 2.900 | 0.25 |  |"
    assert found.finished(power) and not found.finished(replace(power, seed=1))
    assert "| `controls` | Is it the power, or the gate, the block, the size of the state? | 3 of " in (
        tables.studies_table(found)
    )


def lines(table: str, *cells: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]


def test_curves_along_training_are_of_the_same_documents(tmp_path):
    """The last loss is also measured on all documents, and in longer rows."""
    run = pick("bars_4096", "power")
    write(tmp_path, (run, "a", 2.0))
    rows = [(1, 4096, 4, 3.0), (2, 4096, 4, 2.5), (2, 4096, 16, 2.0), (2, 65_536, 16, 1.9)]
    names = ("step", "evaluated_context", "documents", "held_out_loss")
    write_rows(tmp_path / "positions.csv", [
        {"run": run.name, "corpus": "a"} | dict(zip(names, row, strict=True)) for row in rows
    ])  # fmt: skip
    found = Found(tmp_path)
    curve = {tokens: row["held_out_loss"] for tokens, row in found.along(run).items()}
    assert curve == {DOCUMENT: 3.0, 2 * DOCUMENT: 2.5} and found.along(replace(run, seed=1)) == {}


def test_intervals_are_students():
    assert interval([]) is None and interval([2.0]) == (2.0, None, 1)
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.303 / math.sqrt(3)) and found.count == 3
    assert found.text(2) == "2.00 ± 2.48"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.0, 1.01, 1.02], "holds"), ([1.2, 1.21, 1.22], "does not hold"), ([1.0, 1.1, 1.2], "open"),
     ([1.0, 1.01], "open"), ([1.0], "one run"), ([2.5, 2.51, 2.52], "not learned")],
)  # fmt: skip
def test_verdicts_follow_from_intervals(tmp_path, ratios, verdict):
    """The first claim is that of p = 2 at 1,024 tokens: at most 1.10 times the loss of softmax attention."""
    power, softmax = pick("bars_1024", "power"), pick("bars_1024", "softmax")
    runs = [(replace(run, seed=seed), "a", 2.0 * (ratio if run == power else 1))
            for seed, ratio in enumerate(ratios) for run in (power, softmax)]  # fmt: skip
    found = write(tmp_path, *runs)
    row = judged(claims()[0], found, 4.4)
    assert row.verdict == verdict and row.value.count == len(ratios)
    assert [judged(claim, found, 4.4) for claim in claims() if claim.study == "powers"] == [None] * 3
    shown = tables.claims_table(found, 4.4)
    assert (f"| p = 2 times softmax, 1,024 | <= 1.1 | {row.value.text()} |" in shown) == (len(ratios) >= 3)


def test_a_model_that_a_window_of_32_leads_has_not_learned(tmp_path):
    power, gate = pick("controls", "power", context=4096), pick("controls", "softmax_gate", context=4096)
    runs = [(replace(run, seed=seed), "a", loss) for seed in range(3) for run, loss in ((power, 3.0), (gate, 2.0))]
    assert write(tmp_path, *runs).learned(power, 4.0)
    found = write(tmp_path, *runs, (replace(power, variant="window32"), "a", 2.9))
    assert not found.learned(power, 4.0) and found.learned(gate, 4.0) and not found.learned(gate, 1.9)
    verdicts = {row.verdict for claim in claims() if (row := judged(claim, found, 4.0))}
    assert verdicts == {"not learned"}


def test_a_lower_bound_is_one(tmp_path):
    (claim,) = (each for each in claims() if each.least and each.study == "scra_curves")
    runs = [(replace(run, seed=seed), "a", 2.0) for run in claim.runs for seed in range(3)]
    found = write(tmp_path, *runs)
    assert judged(claim, found, 4.0).verdict == "holds"  # a difference of 0 is not below 0


def learned(variant: str, loss: float, seed: int = 0, tokens: int = MIDDLE, **fields) -> tuple[dict, dict]:
    run = LearningRun(variant, 4096, tokens, learning_rate=8e-3, seed=seed)
    row = dict.fromkeys(COLUMNS) | vars(run) | {"held_out_loss": loss, "status": "done", "corpus": "a"} | fields
    far = {
        "run": run.name,
        "corpus": row["corpus"],
        "evaluated_context": DOCUMENT,
        "documents": 16,
        "held_out_loss": loss - 0.1,
    }
    return row, far


def test_the_choice_is_of_the_rows_of_learning(tmp_path):
    """New rows show up, also of other settings; those of another corpus or optimizer do not."""
    made = [
        learned("softmax_gate", 1.5),
        learned("power", 1.6),
        learned("power", 1.7, seed=1),
        learned("power", 1.8, seed=2),
        learned("power", 9.0, corpus="b"),
        learned("window", 9.0, optimizer="adamw"),
    ]
    made += [learned("window", 1.4, tokens=SHORT)]
    write_results(tmp_path / "learning.csv", [row for row, _ in made])
    write_results(tmp_path / "learning_positions.csv", [far for _, far in made])
    times = {"compiled": 1_500_000, "decoding": 12_345}
    (tmp_path / "context_scaling").mkdir()
    write_rows(tmp_path / "context_scaling/speed.csv", [
        {"variant": "power", "context": 4096, "mode": mode, "tokens_per_second": rate} for mode, rate in times.items()
    ])  # fmt: skip
    shown = context_tables.choice_table(context_tables.Evidence(tmp_path))
    assert shown.startswith("| model | 4,096, 30M | 4,096, 100M | 4,096, 100M, read at 65,536 | training")
    assert "| softmax, gate |  | 1.500, one run | 1.400, one run | not timed | 38; 604; 9,664 | not timed |" in shown
    costs = "1.50M; not timed | 19; 19; 19 | 12.3k; not timed |"
    assert f"| power, p = 2 |  | 1.700 ± 0.248 | 1.600 ± 0.248 | {costs}" in shown
    assert "| window of 1,024 | 1.400, one run |  |  | not timed | 9; 9; 9 | not timed |" in shown
    assert "| hybrid, power |  |  |  | not timed | 23; 117; 1,627 | not timed |" in shown
    context_tables.draw(context_tables.Evidence(tmp_path))


def test_the_powers_have_losses_along_training():
    evidence = context_tables.Evidence(RESULTS)
    curves = {
        name: papers_figures.losses(evidence.along_muon(name, 4096, papers_figures.POWERS_RATE)) for name in POWERS
    }
    assert all(len(curve) == 8 and max(curve) == SHORT / 1e6 for curve in curves.values())
    ends = {name: curve[SHORT / 1e6] for name, curve in curves.items()}
    assert sorted(ends, key=ends.get) == ["published_p6", "softmax_plain", "published_p4", "published_p2"]


def test_the_page_of_sources_quotes_its_figures():
    """[SCRA] Figures 3 and 9, by FLOPs."""
    evidence = context_tables.Evidence(RESULTS)
    sources = " ".join((ROOT / "docs" / "sources.md").read_text(encoding="utf-8").split())
    names = [f"body_{name}{papers_figures.NORM}" for name in ("softmax", "power")]
    softmax, power = (papers_figures.by_flops(evidence, name, DOCUMENT, papers_figures.SEEDS) for name in names)
    assert max(power) == pytest.approx(5.2, abs=0.05) and 5.7 < softmax[min(softmax)] < 6.0
    assert f"after 5 PFLOPs it has {power[max(power)]:.2f} nats on four documents, softmax attention 5.8," in sources
    assert f"after {max(softmax):.0f} PFLOPs, softmax attention has {softmax[max(softmax)]:.2f}" in sources
    for context, turn in ((1024, 1.4), (8192, 2.8)):
        linear, window = (papers_figures.by_flops(evidence, name, context, (0,))
                          for name in ("body_linear", "body_window32" + papers_figures.NORM))  # fmt: skip
        behind = [at for (at, loss), other in zip(linear.items(), window.values(), strict=True) if loss >= other]
        assert max(behind) < turn < max(behind) + 0.41  # the curves have a point every 0.4 PFLOPs
    assert "the window leads up to 1.4 of 3.2 PFLOPs at 1,024 tokens and up to 2.8 at 8,192" in sources


def test_bytes_are_those_of_the_states():
    """36 heads: 2,080 rows of 65 numbers of 4 bytes, or 256 bytes a token; so they break even at 2,112.5 tokens."""
    assert context_tables.sequence_bytes("power", 1) == 36 * 2080 * 65 * 4
    assert context_tables.sequence_bytes("power_delta", 1) == 36 * 2080 * 64 * 4
    assert context_tables.sequence_bytes("softmax_gate", 2112) < context_tables.sequence_bytes("power", 1)
    assert context_tables.sequence_bytes("softmax_gate", 2113) > context_tables.sequence_bytes("power", 1)
    assert context_tables.sequence_bytes("window", 10**6) == 36 * 256 * 1024
    with pytest.raises(KeyError):
        context_tables.sequence_bytes("rwkv7", 1)


def use_row(run: LearningRun, measure: str, length: int, documents: list) -> dict:
    value = sum(documents) / len(documents)
    return {"run": run.name, "corpus": "a", "measure": measure, "length": length, "value": value,
            "documents": documents}  # fmt: skip


def test_the_use_of_context_is_over_documents_and_seeds(tmp_path):
    assert context_tables.use_table(tmp_path) == "Not measured yet."
    runs = {(name, seed): LearningRun(name, 4096, MIDDLE, learning_rate=8e-3, seed=seed)
            for name in ("power", "window32") for seed in (0, 1)}  # fmt: skip
    write_results(tmp_path / "learning.csv", [learned(name, 2.0, seed)[0] for name, seed in runs])
    rows = []
    for (name, seed), run in runs.items():
        for length in context_tables.READ_LENGTHS:
            shift = 0.5 * (length < DOCUMENT) + 0.1 * seed
            rows.append(use_row(run, "cut", length, [2.0 + shift, 3.0 + shift + 0.2 * (length == 256)]))
            rows.append(use_row(run, "position", length, [2.0 + (name == "window32"), 3.0 + (name == "window32")]))
            rows.append(use_row(run, "recalled", length, [0.25, 0.75]))
        rows.append(use_row(run, "recalled", 0, [0.25, 0.25]))
    write_rows(tmp_path / "learning_context.csv", rows)
    shown = context_tables.use_table(tmp_path)
    power = next(
        line for line in shown.splitlines() if line.startswith("| power attention, p = 2 | 4,096 | 100M | 2 |")
    )
    assert "| +0.600 ± 1.271 | +0.500 ± 0.000 |" in power and power.endswith("| 25%; 50%, 50%, 50%, 50%, 50% |")
    assert power.count("+1.000 ± 0.000") == 2


def test_the_page_is_short_and_its_folder_small():
    words = PAGE.read_text(encoding="utf-8").split()
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 350 and len(words) <= 3000
    code = [file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks" / "context_scaling").glob("*.py")]
    assert sum(len(file.splitlines()) for file in code) <= 1300


def test_every_study_and_figure_of_the_page_exists():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in STUDIES)
    assert {run.variant.split("+")[0] for study in STUDIES for run in runs_of(study)} <= set(LABELS)
    figures = {*context_tables.FIGURES, *papers_figures.FIGURES}
    drawn = {path for name in figures for path in (PAGE.parent / name).parent.glob("*.png")}
    assert {path.relative_to(PAGE.parent).as_posix() for path in drawn} == figures


def test_sentences_of_the_page_follow_from_the_rows():
    """If one fails after a new measurement, the sentence is no longer true: write another one."""
    evidence, found = context_tables.Evidence(RESULTS), Found(COMMITTED)

    def loss(variant: str, tokens: int, read_at: int | None = None) -> float:
        losses = evidence.losses(variant, 4096, tokens, read_at)
        return sum(losses) / len(losses)

    for context, tokens in evidence.settings():
        best = {name: min(evidence.losses(name, context, tokens), default=9.0) for name in context_tables.MODELS}
        assert context != 4096 or min(best, key=best.get) == "softmax_gate"  # "no model has a clearly lower loss"
    assert all(len(evidence.losses(each, 4096, MIDDLE)) == 3 for each in context_tables.SHOWN)
    gate = loss("softmax_gate", MIDDLE)
    window, power = (loss(each, MIDDLE) / gate for each in ("window", "power"))
    assert f"{window:.2f} times the loss of gated softmax attention; p = 2 has {power:.2f} times" in TEXT
    equal = [interval(evidence.ratios("window+window=2112", 4096, MIDDLE)),
             interval(evidence.losses("window+window=2112", 4096, MIDDLE, DOCUMENT))]  # fmt: skip
    words = "{} times the loss of gated softmax attention at 4,096 tokens, and {} nats read at 65,536"
    assert words.format(*(each.text() for each in equal)) in TEXT
    names = ("hybrid_heads_delta", "softmax_gate", "hybrid_delta_gate", "window", "power")
    best, control, *others = far = [loss(each, MIDDLE, DOCUMENT) for each in names]
    assert (
        best == min(far) and f"Its loss there is {best:.3f} nats, that of gated softmax attention {control:.3f}" in TEXT
    )
    assert f"that of the window {others[1]:.3f}" in TEXT
    fast = ("softmax_gate", "hybrid_heads_delta", "window", "window+window=2112")
    control, *faster = (evidence.speed(each, DOCUMENT) for each in fast)
    words = (
        "it trains {:.1f} times as fast as gated softmax attention, and windows of 1,024 and 2,112 {:.1f} and {:.1f}"
    )
    assert words.format(*(rate / control for rate in faster)) in TEXT
    steps, trains = ([evidence.speed(each, 4096, mode) for each in fast[:2]] for mode in ("decoding", "compiled"))
    short = "it decodes {:.1f} times and trains {:.1f} times as fast"
    assert short.format(steps[1] / steps[0], trains[1] / trains[0]) in TEXT
    bytes_of = [context_tables.sequence_bytes(each, DOCUMENT) / 1e6 for each in names[:2]]
    assert "It has {:.0f} MB, and gated softmax attention {:.0f}".format(*bytes_of) in TEXT
    constant = ("window+window=2112", "window", "power_delta", "power")
    wide, narrow, deltas, powers = long = [evidence.losses(each, DOCUMENT, MIDDLE) for each in constant]
    far_ratio = interval(evidence.ratios(constant[0], DOCUMENT, MIDDLE)).text()
    words = (
        "it has {:.3f} nats, {} times the loss of gated softmax attention. A window of 1,024, with half of the bytes, "
        "and the delta rule have {:.3f} each, and p = 2 has {:.3f} (three runs each)"
    )
    assert words.format(fmean(wide), far_ratio, fmean(narrow), fmean(powers)) in TEXT
    assert f"{fmean(deltas):.3f}" == f"{fmean(narrow):.3f}"
    hybrids, gates = (evidence.losses(each, DOCUMENT, MIDDLE) for each in names[:2])
    assert f"but has {fmean(hybrids):.3f} nats. Gated softmax attention trained there" in TEXT
    assert f"and has {fmean(gates):.3f} nats (three runs each)" in TEXT
    assert all(len(losses) == 3 for losses in (*long, hybrids, gates))
    read = {row["variant"]: row["loss"] for row in known(RESULTS / "long_text_gpu.csv") if row["end"] == 1 << 20}
    pairs = [[f"{read[each]:.3f}" for each in two] for two in (names[:2], ("power_delta", "window"))]
    assert all("end at {} and {} nats".format(*pair) in TEXT for pair in pairs)
    assert abs(read["window"] - read["power_delta"]) < abs(deltas[0] - deltas[1])
    decoding = [evidence.speed(each, DOCUMENT, "decoding") for each in names[:2]]
    assert f"It decodes {decoding[0] / decoding[1]:.1f} times as fast" in TEXT
    window, delta = (loss(each, LONG) for each in ("window", "power_delta"))
    assert (
        f"these two are level ({window:.3f} and {delta:.3f} nats, one run each)" in TEXT and abs(window - delta) < 0.01
    )

    def behind(variant: str, control: str, context: int) -> str:
        pairs = zip(*(evidence.losses(each, context, MIDDLE) for each in (variant, control)), strict=True)
        return interval([own - other for own, other in pairs]).text()

    words = "the delta rule is {} nats behind it and {} behind the window of 1,024 after 100 million"
    assert words.format(*(behind("power_delta", each, 4096) for each in constant[:2])) in TEXT
    words = "in rows of 65,536 p = 2 is {} nats behind that window (three pairs each)"
    assert words.format(behind("power", "window", DOCUMENT)) in TEXT
    read = [loss(each, LONG, DOCUMENT) for each in ("window", "power_delta", "heads_delta")]
    words = "that window, delta rule and both (without offset) have {:.3f}, {:.3f} and {:.3f} (one run each)"
    assert words.format(*read) in TEXT
    halves, alone = (evidence.speed(each, DOCUMENT, "decoding") for each in ("heads_delta", "window"))
    assert "and decode half as fast" in TEXT and 0.45 < halves / alone < 0.55
    name = 'heads_delta+options={"offset":0.09}'
    offset = [row["held_out_loss"] for row in known(RESULTS / "learning.csv")
              if (row["variant"], row["tokens"]) == (name, LONG)]  # fmt: skip
    both = fmean(offset)
    link = "[an offset of the scores](learning.md#options-that-were-tried)"
    words = f"then have {loss('heads_delta', LONG):.3f} (one run), or {both:.3f} with {link} (three)"
    assert words in TEXT and both < delta and len(offset) == 3
    found_ratios = {
        context: evidence.ratios("hybrid_heads_delta", context, MIDDLE) for context in (4096, 16_384, DOCUMENT)
    }
    texts = {context: interval(ratios).text() for context, ratios in found_ratios.items()}
    assert {len(ratios) for ratios in found_ratios.values()} == {3}
    assert f"has {texts[4096]} times its loss (three pairs) and 18 MB in place of 38" in TEXT
    words = "in rows of 16,384 and 65,536 the hybrid has {} and {} times the loss of gated softmax attention"
    assert words.format(texts[16_384], texts[DOCUMENT]) in TEXT
    many = [Run(each, DOCUMENT, MIDDLE, documents=8) for each in ("power", "softmax")]
    assert f"p = 2 has {found.ratio(*many).text()} times the loss of softmax attention" in TEXT
    assert f"softmax attention had {found.mean(many[1], 'held_out_loss').mean:.3f} nats" in TEXT
    assert f"counting bigrams gives {not_learned():.3f}" in TEXT
    for variant in ("window32", "power"):
        ratio = found.ratio(Run(variant, DOCUMENT), Run("softmax", DOCUMENT))
        assert f"({ratio.text()}" in TEXT and ratio.count == 3


def test_the_readme_says_by_the_rows_which_model_to_train():
    readme, evidence = " ".join((ROOT / "README.md").read_text("utf-8").split()), context_tables.Evidence(RESULTS)

    def times(variant: str, control: str, read_at: int | None = None, context: int = 4096) -> Interval:
        pairs = zip(*(evidence.losses(each, context, MIDDLE, read_at) for each in (variant, control)), strict=True)
        found = interval([own / other for own, other in pairs])
        assert found.count == 3
        return found

    equal = times("hybrid_heads_delta", "softmax_gate", DOCUMENT)
    assert f"in rows of 4 thousand: {equal.text()} times the loss of gated softmax" in readme
    controls = ("window+window=2112", "softmax_gate", "hybrid_heads_delta")
    words = "has {:.2f} times its loss, {:.2f} times that of gated softmax and {:.2f} times that of the hybrid"
    assert words.format(*(times("power", each).mean for each in controls)) in readme
    words = "of the hybrid; trained in rows of 65,536 {:.2f}, {:.2f} and {:.2f}."
    assert words.format(*(times("power", each, context=DOCUMENT).mean for each in controls)) in readme
    gate, hybrid = (context_tables.sequence_bytes(each, DOCUMENT) for each in controls[1:])
    far = context_tables.sequence_bytes(controls[2], 1 << 20) / 1e9
    assert round(gate / hybrid) == 5 and "a fifth of the bytes" in readme and f"if {far:.1f} GB fit" in readme
    read = {row["variant"]: row["loss"] for row in known(RESULTS / "long_text_gpu.csv") if row["end"] == 1 << 20}
    less = read["hybrid_heads_delta"] / read["softmax_gate"]
    same = times(*controls[:0:-1], context=DOCUMENT).mean
    assert f"({less:.2f} times the loss of gated softmax, one run; {same:.2f} in rows of 65,536)" in readme


@pytest.mark.parametrize(
    ("words", "told"), [(["show", "bars_4096"], "| 4,096 tokens | p = 2, 0.002 | 3.017 "), (["claims"], "| one run |")]
)
def test_results_are_printed(call, capsys, words, told):
    assert call(program, *words) == 0 and told in capsys.readouterr().out


def test_other_pages_quote_the_committed_rows():
    found = Found(COMMITTED)

    def ratio(study: str, variant: str, digits: int, **setting: int) -> str:
        runs = (pick(study, each, **setting) for each in (variant, "softmax"))
        return f"{found.ratio(*runs).mean:.{digits}f}"

    decision = " ".join((ROOT / "docs/decisions/0007-block.md").read_text(encoding="utf-8").split())
    early, late = (ratio("tokens_16384", "power", 3, tokens=tokens) for tokens in (SHORT, MIDDLE))
    assert f"16,384 tokens it is {early} after 30 million tokens and {late} after 100 million." in decision
    names = {"power": "p = 2", "power_p4_k24": "p = 4, K = 24",
             "power_p4_k32": "p = 4, K = 32, two key/value heads of six", "power4": "p = 4, K = 64",
             "hybrid_window": "power, and windows of 512 in every second layer",
             "hybrid_softmax": "power, and softmax attention in the fourth of six layers",
             "hybrid_softmax_gate": "the same, with the gate in the softmax layer",
             "hybrid_softmax_window": "windows of 512 in three of six layers, softmax attention in the fourth, "
                                      "power in two"}  # fmt: skip
    for variant, name in names.items():
        assert f"| {name} | {ratio('bars_1024', variant, 3)} | {ratio('bars_4096', variant, 3)} |" in decision
    for study, variant, context in (("controls", "power", 4096), ("controls", "power", DOCUMENT),
                                    ("bars_4096", "hybrid_softmax_gate", 4096)):  # fmt: skip
        run = pick(study, variant, context=context)
        behind = found.difference(run, replace(run, variant="softmax_gate"))
        assert behind.count == 3 and behind.text(sign=True) in decision
    parts = {"power_no_convolution": "no short convolution", "power_no_output_gate": "no output gate",
             "power_no_head_norm": "no norm of heads", "power_turned": "a rotation of all channels",
             "power_data": "a data-dependent rotation",
             "power_plain": "none of the three parts, and a rotation of all channels"}  # fmt: skip
    for variant, name in parts.items():
        change = found.difference(pick("ablations", variant), pick("ablations", "power"))
        assert change.count == (6 if variant == "power_data" else 3)
        assert f"| {name} | {change.text(sign=True)} |" in decision
    plain = found.difference(Run("softmax_plain", 4096), Run("softmax", 4096))
    assert plain.count == 1 and f"loss at 4,096 tokens is {plain.mean:.3f} higher (one pair)" in decision
    kernel = [row for row in known(RESULTS / "learning.csv") if row["corpus"] == KERNEL]
    losses = {run_of(row): row["held_out_loss"] for row in kernel}
    power, still = (losses[LearningRun(name, 4096, learning_rate=8e-3)] for name in ("power", "power+rotation=none"))
    runs = [LearningRun("power", 1024, learning_rate=8e-3, seed=seed) for seed in range(3)]
    published = fmean(losses[replace(run, variant="published_p2_gated")] - losses[run] for run in runs)
    assert f"its loss at 1,024 tokens is {published:.3f} higher (three pairs)" in decision
    assert f"without a rotation is {power - still:.3f} lower (one pair)" in decision
    guide = (ROOT / "docs/guides/choosing.md").read_text(encoding="utf-8")
    guide = guide.partition("with AdamW")[2]
    for variant in ("power", "hybrid_window", "hybrid_softmax", "hybrid_softmax_gate", "hybrid_softmax_window"):
        (line,) = (line for line in guide.splitlines() if f"| `scaling:{variant}` |" in line)
        assert line.endswith(f" | {ratio('bars_1024', variant, 2)} | {ratio('bars_4096', variant, 2)} |")
