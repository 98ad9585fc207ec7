"""The page of converted models: every table from rows, and the committed page from the committed rows."""

from benchmarks.pages.conversion_report import PAGE, TABLES, report, write_report

RUN = {"run": "student-A", "layers": "power,power,softmax", "processor": "a GPU", "torch": "2", "commit": "abc"}
ROWS = [
    {"kind": "logits", "model": "smol", "tokens": 64, "difference": 5e-5, "same_angles": 3e-5, "largest": 40.0,
     "ours_to_exact": 1e-5, "theirs_to_exact": 2e-5},
    {"kind": "loss", "context": 2048, "rows": 64, "converted": 2.75, "teacher": 2.7},
    {"kind": "stage", "stage": 1, "step": 100, "tokens": 5000, "seconds": 9.0, "held_out_loss": 3.5,
     "teacher_loss": 2.7, "gap": 0.8},
    {"kind": "stage", "stage": 1, "step": 200, "tokens": 10000, "seconds": 19.0, "held_out_loss": 3.0,
     "teacher_loss": 2.7, "gap": 0.3},
    *({"kind": "depths", "model": model, "context": context, "depth": depth, "texts": 10, "accuracy": accuracy,
       "digits": accuracy} for model, context, depth, accuracy in (
        ("student-A", 1024, 0.0, 0.5), ("student-A", 1024, 1.0, 1.0), ("student-A", 2048, 0.5, 0.7),
        ("student-A", 4096, 0.5, 0.0), ("student-A", 4096, 0.0, 0.0), ("teacher", 2048, 0.0, 1.0))),
    *({"kind": "needles", "model": "student-A", "task": "single", "values": values, "context": 4096, "depth": depth,
       "distance": 9.0, "texts": 10, "accuracy": accuracy} for values, depth, accuracy in (
        ("digits", 1.0, 1.0), ("digits", 0.0, 0.9), ("digits", 0.5, 0.95), ("words", 0.0, 0.3))),
    *({"kind": "positions", "model": model, "rows": 8, "bins": [
        {"start": 0, "end": 512, "loss": 9.0}, {"start": 4096, "end": 8192, "loss": 2.5},
        {"start": 16_384, "end": 32_768, "loss": loss}]} for model, loss in (("teacher", 8.25), ("converted", 2.25))),
    {"kind": "decoding", "model": "teacher, growing cache", "context": 2048, "batch": 32, "tokens_per_second": 1000.0,
     "state_bytes": 5_000_000, "graph": False},
    {"kind": "decoding", "model": "teacher, whole cache", "context": 2048, "batch": 32, "tokens_per_second": None,
     "state_bytes": None, "graph": False},
    {"kind": "decoding", "model": "power", "context": 2048, "batch": 32, "tokens_per_second": 3500.0,
     "state_bytes": 1_000_000, "graph": True},
    {"kind": "harness", "task": "pages", "samples": 4, "metric": "bits_per_byte", "value": 1.23456, "harness": "0.4"},
]  # fmt: skip


def test_every_kind_of_row_has_a_table():
    page = report(PAGE.read_text(), [row if row["kind"] in ("depths", "needles") else RUN | row for row in ROWS])
    assert "Not run yet." not in page
    for line in (
        "| smol | 64 | 5.0e-05 | 3.0e-05 | 40.0 | 1.0e-05 | 2.0e-05 |",
        "| student-A | 2 power, 1 softmax | 2,048 | 64 | 2.7500 | 2.7000 | +0.0500 |",
        "| student-A | layers | 200 | 10,000 | 19 | 3.0000 | 2.7000 | +0.3000 |",
        "| run | rows | to 8,192 | to 32,768 |",
        "| student-A | 8 | 2.5000 | 2.2500 |",
        "| model | tokens | depth 0 | depth 0.5 | depth 1 |",
        "| student-A | 1,024 | 50% | not run | 100% |",
        "| teacher | 2,048 | 100% | not run | not run |",
        "| model | task | values | tokens | depth 0 | depth 0.5 | depth 1 |",
        "| student-A | single | digits | 4,096 | 90% | 95% | 100% |",
        "| student-A | single | words | 4,096 | 30% | not run | not run |",
        "| teacher, whole cache | 2,048 | 32 |  | out of memory |  |  |",
        "| power | 2,048 | 32 | graph | 3,500 | 3.50x | 1 |",
        "| student-A | abc | pages | 4 | bits_per_byte | 1.235 |",
        "a GPU; torch 2, commit abc.",
    ):
        assert line in page
    assert "| student-A | layers | 100 |" not in page  # only the end of a stage


def test_the_summary_says_what_a_student_recalls_and_forgets():
    page = report(PAGE.read_text(), [row if row["kind"] in ("depths", "needles") else RUN | row for row in ROWS])
    first = page.index("- **student** (2 power, 1 softmax).")
    summary = " ".join(page[first : page.index("Distances are counted")].split())
    for sentence in (
        "Phase A (0 million tokens): a gap of +0.050 nats in 2,048 tokens.",
        "Passkeys: 100% at the end, 50% to 70% 1,024 tokens back, 0% from 2,048 to 4,096 tokens back.",
        "In 1,024 tokens, only the depths 0 and 1 are measured.",
        "In 2,048 tokens, only the depth 0.5 is measured.",
        "Needles: single digits 100% at the end and 90% to 95% farther back; single words 30% farther back.",
        "in nats: student-A -0.250, teacher +5.750.",
    ):
        assert sentence in summary


def test_a_page_without_rows_says_so():
    assert report(PAGE.read_text(), []).count("Not run yet.") == len(TABLES)


def test_the_committed_page_is_that_of_the_committed_rows(tmp_path):
    assert write_report(page=tmp_path / "page.md").read_text() == PAGE.read_text()
