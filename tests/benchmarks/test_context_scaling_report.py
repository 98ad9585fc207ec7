"""The report: its numbers out of made-up rows with known answers, and that the page follows from committed rows."""

import math
import sys
from dataclasses import replace
from functools import partialmethod

import pytest
from matplotlib.figure import Figure

from benchmarks.context_scaling import __main__ as program
from benchmarks.context_scaling import figures, report, sections, tables, verdicts
from benchmarks.context_scaling.found import Found, pick, runs_of
from benchmarks.context_scaling.grid import DOCUMENT, MIDDLE, SHORT, Run
from benchmarks.context_scaling.labels import LABELS, LOOKS
from benchmarks.context_scaling.measures import contexts_of, gain
from benchmarks.context_scaling.paired import interval
from benchmarks.context_scaling.results import COLUMNS, Results
from benchmarks.context_scaling.studies import STUDIES
from sympow.recall import write_results

OFFSETS = {"softmax": 0.0, "power": 0.2, "power4": 0.02, "hybrid_softmax": -0.05}


def made_up(run: Run) -> tuple[dict, list[dict]]:
    """Returns rows of a run: a loss of 2.5, higher by the variant's offset, by 0.1 a seed, and by 0.01 a seed more but
    for softmax attention; falling by 0.05 each time the position doubles, from 128 on."""
    offset = OFFSETS.get(run.variant, 0.1)
    loss = 2.5 + offset + 0.1 * run.seed + (0.01 * run.seed if run.variant != "softmax" else 0)
    positions = []
    for share in (0.5, 1.0):
        for context in contexts_of(run.trained_at, DOCUMENT) if share == 1 else [run.trained_at]:
            bins = {str(1 << n): round(loss + 1 / share - 1 - 0.05 * max(0, n - 7), 4)
                    for n in range(int(math.log2(context)) + 1)}  # fmt: skip
            positions.append({"run": run.name, "corpus": "9 rows", "step": round(share * run.steps),
                              "evaluated_context": context, "documents": 16, "held_out_loss": loss + 1 / share - 1,
                              **bins})  # fmt: skip
    own = next(row for row in positions if row["step"] == run.steps)
    row = {**dict.fromkeys(COLUMNS), **vars(run), "scale": "full", "status": "done", "held_out_loss": loss,
           "best_loss": loss - 0.1, "gain": gain(own, run.trained_at), "flops": 1e8 * run.tokens,
           "corpus": "9 rows"}  # fmt: skip
    return row, positions


def write(folder, *runs: tuple[Run, str, float]) -> Found:
    """Returns what is found where these runs are finished on these versions of the corpus with these losses."""
    rows, positions = [], []
    for run, corpus, loss in runs:
        row, of_run = made_up(run)
        rows.append(row | {"corpus": corpus, "held_out_loss": loss, "best_loss": loss - 0.1})
        positions += [each | {"corpus": corpus} for each in of_run]
    Results(rows, positions).write(folder)
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
    (line,) = lines(tables.comparison(found, "bars_4096"), "4,096 tokens", "power, p = 2")
    assert line.endswith(" | 3 | 2 |") and " | +0.850 ± " in line
    assert found.along(power).keys() == found.last(power).keys() == {("a", 0), ("b", 0), ("b", 1)}


def test_runs_without_a_pair_are_shown_and_not_compared(tmp_path):
    power, softmax, gate = (pick("controls", each, context=4096) for each in ("power", "softmax", "softmax_gate"))
    found = write(tmp_path, (power, "a", 3.0), (softmax, "b", 2.0), (gate, "b", 1.9))
    assert found.difference(power, softmax) is None
    (line,) = lines(tables.comparison(found, "controls"), "4,096 tokens", "power, p = 2")
    assert line == "| 4,096 tokens | power, p = 2 | 3.000 |  |  | 2.900 | 0.25 |  | 1 | 0 |"
    assert verdicts.untold(verdicts.controls(found)[0])
    assert 'minus that of "softmax, gate", claimed at most 0.' in sections.missing(found)


def test_a_run_finished_on_either_corpus_counts_once(tmp_path):
    power, softmax = pick("bar_65536", "power"), pick("bar_65536", "softmax")
    found = write(tmp_path, (power, "a", 3.0), (replace(power, seed=1), "b", 3.0), (softmax, "a", 2.0),
                  (softmax, "b", 2.0), (replace(softmax, seed=7), "b", 2.0))  # fmt: skip
    assert found.finished(replace(power, seed=1)) and not found.finished(replace(softmax, seed=1))
    assert "(`bar_65536`, 3 of 6 runs)" in sections.missing(found)
    assert "Study `bar_65536`: 3 of 6 runs are finished. Corpus: `a` and `b`." in sections.results(found, "page")
    rows = [(row["variant"], row["corpus"], row["seed"]) for row in report.bars(found)]
    assert rows == [("softmax", "a", 0), ("softmax", "b", 0), ("softmax", "b", 7), ("power_p2", "a", 0),
                    ("power_p2", "b", 1)]  # fmt: skip


def test_a_claim_without_a_pair_is_missing_even_if_all_runs_are_finished(tmp_path):
    found = write(tmp_path, *((run, corpus, 3.0) for run, corpus in zip(runs_of("scra_latency"), "abcde", strict=True)))
    listed = sections.missing(found).split("(`scra_latency`, 5 of 5 runs)")[1].split("- **")[0]
    assert listed.count("claimed at most 0.") == 6


def test_rates_of_a_variant_are_compared_by_pairs(tmp_path):
    """On "b" all losses are higher, and only pairs show that 4e-3 is better than 2e-3."""
    low, middle, high = (pick("rates_1024", "power", learning_rate=rate) for rate in (2e-3, 4e-3, 8e-3))
    other, alone = pick("rates_1024", "power4", learning_rate=4e-3), pick("rates_1024", "power4", learning_rate=2e-3)
    found = write(tmp_path, (low, "a", 2.0), (low, "b", 3.0), (middle, "b", 2.9), (high, "a", 2.05), (alone, "a", 2.0),
                  (other, "b", 1.0))  # fmt: skip
    shown = tables.rates(found, "rates_1024")
    assert shown.splitlines()[0] == "|  | loss at 0.002 | change at 0.004 | change at 0.008 |"
    (line,) = lines(shown, "power, p = 2")
    assert line.endswith(" | **-0.100** | +0.050 |") and line.startswith("| power, p = 2 | 2.500 ± ")
    assert lines(shown, "power, p = 4") == [f"| power, p = 4 | 2.000 | -1.000 (no pair) | {tables.MISSING} |"]
    drawn = figures.learning_rates(found, "rates_1024").axes[0].containers
    assert [[round(float(y), 3) for y in bars.lines[0].get_ydata()] for bars in drawn] == [[0.0, -0.1, 0.05]]


def test_curves_along_training_are_of_samples_that_all_variants_have(tmp_path):
    power, softmax = pick("bar_65536", "power"), pick("bar_65536", "softmax")
    found = write(tmp_path, (power, "a", 3.0), (power, "b", 3.0), (softmax, "b", 2.0))
    counts = {run.variant: [[row["corpus"] for row in rows] for _, rows in points]
              for run, points in tables.along(found, [power, softmax]).items()}  # fmt: skip
    assert counts == {"power": [["b"]] * 2, "softmax": [["b"]] * 2}
    found = write(tmp_path, (power, "a", 3.0), (power, "b", 3.0), (softmax, "c", 2.0))
    assert [len(rows) for _, rows in tables.along(found, [power, softmax])[power]] == [2, 2]


def test_each_study_names_its_corpus_where_the_page_has_several(tmp_path):
    corpora = {"powers": "new", "bars_4096": "old"}
    rows = [made_up(replace(run, seed=seed))[0] | {"corpus": corpus}
            for study, corpus in corpora.items() for run in runs_of(study) for seed in range(3)]  # fmt: skip
    Results(rows, []).write(tmp_path)
    text = sections.results(Found(tmp_path), "figures")
    assert "Study `powers`: 12 of 12 runs are finished. Corpus: `new`." in text
    assert "Study `bars_4096`: 27 of 27 runs are finished. Corpus: `old`." in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    runs = dict.fromkeys(run for study in STUDIES for run in runs_of(study))
    made = [made_up(replace(run, seed=seed)) for run in runs for seed in range(3)]
    Results([row for row, _ in made], [row for _, rows in made for row in rows]).write(folder)
    times = [{"variant": variant, "context": DOCUMENT, "mode": "eager", "tokens_per_second": speed}
             for variant, speed in (("softmax", 1000), ("power", 4000), ("window", 2000))]  # fmt: skip
    write_results(folder / "speed.csv", times)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return Found(folder)


def test_intervals_are_students():
    assert interval([]) is None and interval([2.0]) == (2.0, None, 1)
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.303 / math.sqrt(3)) and found.count == 3
    assert found.text(2) == "2.00 ± 2.48"


def lines(table: str, *cells: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]


def test_differences_between_seeds_cancel_in_pairs(found):
    """Seeds differ by 0.1 for all alike, which leaves no trace in a difference."""
    rows = lines(tables.comparison(found, "bars_1024"), "1,024 tokens", "power, p = 2")
    half, of_all = (4.303 * spread / math.sqrt(3) for spread in (0.01, 0.11))
    assert rows == [f"| 1,024 tokens | power, p = 2 | 2.810 ± {of_all:.3f} | +0.210 ± {half:.3f} | "
                    f"{(2.7 / 2.5 + 2.81 / 2.6 + 2.92 / 2.7) / 3:.3f} ± 0.002 | 2.710 ± {of_all:.3f} | "
                    "0.15 ± 0.00 | 100% | 3 | 3 |"]  # fmt: skip
    assert lines(tables.comparison(found, "ablations"), "4,096 tokens", "eps 1e-6")[0].count("-0.100") == 1


def test_budgets_end_where_the_cheaper_run_ends(found):
    """At 65,536 tokens power attention takes a quarter of the time: softmax attention is at the start of its curve, at
    which its loss lies 2 (0.5 - 0.25) = 0.5 above that at half of its run."""
    (row,) = lines(tables.budgets(found, "by_context"), "65,536 tokens")
    assert row.split(" | ")[2:] == ["+0.210 ± 0.025 (1.0x)", f"{0.21 - 1.5:+.3f} ± 0.025 (4.0x) |"]
    assert tables.MISSING in lines(tables.budgets(found, "by_context"), "1,024 tokens")[0]


def test_losses_along_a_run_are_those_on_the_same_documents(tmp_path):
    """Before the end of a run they are of fewer documents, and the end on all documents is not compared with them."""
    run = pick("bar_65536", "power")
    row, positions = made_up(run)
    before, *ends = positions
    few = [before | {"documents": 4}, ends[0] | {"documents": 4, "held_out_loss": 9.0}]
    for given, steps in (([few[0], *ends], [before["step"]]), ([*few, *ends], [before["step"], run.steps])):
        Results([row], given).write(tmp_path)
        found = Found(tmp_path)
        (along,), (last,) = found.along(run).values(), found.last(run).values()
        assert [each["step"] for each in along] == steps
        assert {each["documents"] for each in along} == {4}
        assert last["documents"] == 16 and last["held_out_loss"] == row["held_out_loss"]
        assert tables.along(found, [run])[run][-1][0] == steps[-1] / run.steps


def test_time_to_end_below_the_baselines_loss(found):
    run, base = (pick("bar_65536", variant) for variant in ("power", "softmax"))
    assert verdicts.time_to_end_below(found, run, base) == (math.inf, None, 3)
    assert verdicts.bar_65536(found)[1].startswith("**Refuted**: the time after which p = 2 ends below")
    assert verdicts.time_to_end_below(found, base, run) == (4, None, 3)
    power, linear = (pick("scra_window", variant, context=DOCUMENT) for variant in ("power", "linear"))
    assert verdicts.time_to_end_below(found, power, linear) is None  # not timed


def test_a_lead_at_the_first_positions_is_told(found):
    """Power attention is 0.21 behind at all positions alike."""
    run, base = (pick("bar_65536", variant) for variant in ("power", "softmax"))
    (said,) = verdicts.lead_by_position(found, run, base)
    assert said.count("-0.210 ± 0.025 nats") == 3


def test_verdicts_follow_from_intervals(found):
    said = verdicts.bars_1024(found)
    assert said[0].startswith(
        '**Reproduced**: the loss of "power, p = 2" over that of softmax attention at 1,024 tokens is 1.081 ± 0.002 '
        "(3 pairs; claimed at most"
    )
    assert said[3].startswith('**Reproduced**: the loss of "power, p = 4" over')
    assert said[4].startswith('**Reproduced**: the loss of "five power')
    assert said[7].startswith("**Reproduced**") and said[8].startswith("**Reproduced**: the gain")
    assert verdicts.powers(found)[1].startswith(
        "**Refuted**: as published, at 4,096 tokens, the loss of p = 4 over that of softmax attention is 1.000 ± 0.000"
    )
    one = verdicts.judged(interval([0.9]), 1.0, "this")
    assert one == "**Left open**: this is 0.900 (1 pair; claimed at most 1)."
    wide = verdicts.judged(interval([0.8, 1.1, 1.0]), 1.0, "this")
    assert wide.startswith("**Left open**: this is 0.967 ± ")
    assert lines(tables.beyond(found, "beyond"), "1,024 tokens", "softmax")[0].endswith(" -0.200 ± 0.000 | 3 |")
    falls, rises = verdicts.beyond(found)[:2]
    assert falls.startswith("**Reproduced**") and rises.startswith("**Refuted**")
    assert all(write(found) for write in verdicts.VERDICTS.values())


def test_claims_are_those_that_the_sources_make(found):
    """[SCRA] Table 4 compares states of equal size, 5.3 says "nearly as well", [CST] Figure 2 has no softmax attention.

    By the made-up rows, p = 2 is 0.2 above softmax attention and a window 0.1, and 0.01 more for each seed.
    """
    ahead, behind, between = verdicts.scra_states(found)
    assert ahead.startswith('**Refuted**: the best-context loss of "power, p = 2" at 4,096 tokens minus that of ')
    assert '"softmax" at 1,024 is 0.210 ± ' in ahead
    assert behind.startswith('**Reproduced**: the best-context loss of "window of 1,024" at 4,096 tokens')
    assert between.startswith('**Refuted**: the best-context loss of "power, p = 2"') and "is 0.100 ± 0.000" in between
    (line,) = lines(tables.best_context(found, "scra_states"), "4,096 tokens", "power, p = 2")
    assert " | +0.210 ± " in line and line.endswith(" | 3 | 3 |")
    assert not any(word in verdicts.scra_curves(found)[0] for word in ("claimed", "**"))
    assert not any("softmax" in sentence for sentence in verdicts.beyond(found))
    gated = ['"power, p = 1" minus that of "window of 32"' in said for said in verdicts.scra_window(found)]
    assert gated == [False, True, False, True]
    assert all("17.8M weights and 0.2% of the tokens" in said for said in verdicts.powers(found))
    assert "equal time" not in sections.SECTIONS["scra_states"].text
    assert "No source" in sections.SECTIONS["scra_latency"].text


def test_the_whole_page_is_written_and_checked(folder, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(program.PAGE.read_text())
    words = ("report", "--results", str(folder), "--page", str(page))
    monkeypatch.setattr(Figure, "savefig", partialmethod(Figure.savefig, dpi=20))
    monkeypatch.setattr(sys, "argv", ["context_scaling", *words])
    assert program.main() == 0
    drawn = {file.stem for file in (tmp_path / "page").iterdir()}
    assert drawn == set(report.FIGURES)
    bars = page.read_text().split("### Against softmax attention at 1,024")[1].split("### Longer")[0]
    assert "1.081 ± 0.002" in bars and tables.MISSING not in bars
    assert all(f"(page/{name}.png)" in page.read_text() for name in drawn)
    rows = (folder / "bars.csv").read_text().splitlines()
    assert rows[0] == "variant,context,corpus,seed,tokens,held_out_loss,gain,tokens_per_second"
    assert f"power_p2,65536,rows,0,{MIDDLE},2.7,0.45,4000" in rows
    monkeypatch.setattr(sys, "argv", ["context_scaling", *words, "--check"])
    capsys.readouterr()
    assert program.main() == 0 and capsys.readouterr().out == ""
    page.write_text(page.read_text().replace("1.081", "1.080"))
    (tmp_path / "page" / "powers.png").unlink()
    assert program.main() == 1
    assert capsys.readouterr().out == "out of date: page.md\nout of date: powers.png\n"


def test_the_committed_page_follows_from_the_committed_rows():
    assert report.out_of_date(program.COMMITTED, program.PAGE) == []


def test_other_pages_quote_the_committed_rows():
    found = Found(program.COMMITTED)

    def ratio(study: str, variant: str, digits: int, **setting: int) -> str:
        runs = (pick(study, each, **setting) for each in (variant, "softmax"))
        return f"{found.ratio(*runs).mean:.{digits}f}"

    decision = (program.ROOT / "docs/decisions/0007-block.md").read_text(encoding="utf-8")
    early, late = (ratio("tokens_16384", "power", 3, tokens=tokens) for tokens in (SHORT, MIDDLE))
    assert f"16,384 it is {early} after 30, {late} after 100." in decision
    names = {"power": "p = 2", "power_p4_k32": "p = 4, K = 32, two key/value heads of six", "power4": "p = 4, K = 64",
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
        assert behind.count == 3 and behind.text(sign=True) in " ".join(decision.split())
    parts = {"power_no_convolution": "without the short convolution", "power_no_head_norm": "without the norm",
             "power_no_output_gate": "without the output gate", "power_plain": "without all"}  # fmt: skip
    for variant, name in parts.items():
        change = found.difference(pick("ablations", variant), pick("ablations", "power"))
        assert change.count == 3 and f"{change.text(sign=True)} {name}" in " ".join(decision.split())
    guide = (program.ROOT / "docs/guides/choosing.md").read_text(encoding="utf-8")
    hybrids = ("hybrid_window", "hybrid_softmax", "hybrid_softmax_gate", "hybrid_softmax_window")
    for variant in ("power", *hybrids):
        (line,) = (line for line in guide.splitlines() if f"| `scaling:{variant}` |" in line)
        assert line.endswith(f" | {ratio('bars_1024', variant, 2)} |")
    listed = "{}, {}, {} and {}".format(*(ratio("bars_4096", variant, 2) for variant in hybrids))
    assert f"ratios of the last four rows are {listed}" in " ".join(guide.split())


def test_every_study_is_shown_or_named_as_missing(found, tmp_path):
    assert set(sections.SECTIONS) == set(STUDIES) and set(verdicts.VERDICTS) <= set(STUDIES)
    shown = sections.results(found, "page")
    assert [name for name in STUDIES if sections.picture(name, "page") not in shown] == []
    empty = Found(tmp_path)
    assert "###" not in sections.results(empty, "page")
    left = sections.missing(empty)
    assert [name for name in STUDIES if f"(`{name}`, 0 of " not in left] == []
    claim = "as published, at 4,096 tokens, the loss of p = 4 over that of softmax attention"
    assert f"\n    - {claim}, claimed at most 0.98.\n" in left


def test_what_the_page_does_not_know_is_named(found):
    with pytest.raises(ValueError, match="the page asks for the part 'nothing'; there are "):
        report.filled("<!-- part: nothing --><!-- end -->", found, "page")


def test_every_variant_has_a_name_and_a_look_where_it_is_drawn_in_lines():
    variants = {run.variant.split("+")[0] for study in STUDIES for run in runs_of(study)}
    assert variants <= set(LABELS)
    for study in ("by_context", "conformal", "beyond", "rates_4096", "scra_ratio", "scra_axes", "tokens_4096"):
        looks = [LOOKS[variant] for variant in dict.fromkeys(run.variant for run in runs_of(study))]
        assert len(set(looks)) == len(looks), study
