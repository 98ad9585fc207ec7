"""The page of converted models: every table from rows, and the committed page from the committed rows."""

from benchmarks.conversion_report import PAGE, SECTIONS, report, write_report

RUN = {"run": "student", "layers": "power,power,softmax", "processor": "a GPU", "torch": "2", "commit": "abc"}
ROWS = [
    {"kind": "logits", "model": "smol", "tokens": 64, "difference": 5e-5, "same_angles": 3e-5, "largest": 40.0,
     "ours_to_exact": 1e-5, "theirs_to_exact": 2e-5},
    {"kind": "loss", "context": 2048, "rows": 64, "converted": 2.75, "teacher": 2.7},
    {"kind": "stage", "stage": 1, "step": 100, "tokens": 5000, "seconds": 9.0, "held_out_loss": 3.5,
     "teacher_loss": 2.7, "gap": 0.8},
    {"kind": "stage", "stage": 1, "step": 200, "tokens": 10000, "seconds": 19.0, "held_out_loss": 3.0,
     "teacher_loss": 2.7, "gap": 0.3},
    {"kind": "passkey", "model": "converted", "length": 4096, "count": 40, "right": 30, "accuracy": 0.75},
    *({"kind": "depths", "model": model, "context": context, "depth": depth, "texts": "10", "accuracy": accuracy,
       "digits": accuracy} for model, context, depth, accuracy in (
        ("student", "1024", "0.0", "0.5"), ("student", "1024", "1.0", "1.0"), ("teacher", "2048", "0.0", "1.0"))),
    {"kind": "positions", "model": "teacher", "rows": 8, "bins": [
        {"start": 0, "end": 512, "loss": 9.0}, {"start": 512, "end": 1024, "loss": 2.5}]},
    {"kind": "decoding", "model": "teacher, growing cache", "context": 2048, "batch": 32, "tokens_per_second": 1000.0,
     "state_bytes": 5_000_000, "graph": False},
    {"kind": "decoding", "model": "teacher, whole cache", "context": 2048, "batch": 32, "tokens_per_second": None,
     "state_bytes": None, "graph": False},
    {"kind": "decoding", "model": "power", "context": 2048, "batch": 32, "tokens_per_second": 3500.0,
     "state_bytes": 1_000_000, "graph": True},
    {"kind": "harness", "task": "pages", "samples": 4, "metric": "bits_per_byte", "value": 1.23456, "harness": "0.4"},
]  # fmt: skip


def test_every_kind_of_row_has_a_table():
    page = report([RUN | row for row in ROWS])
    assert "Not run yet." not in page
    for line in (
        "| smol | 64 | 5.0e-05 | 3.0e-05 | 40.0 | 1.0e-05 | 2.0e-05 |",
        "| student | 2 power, 1 softmax | 2,048 | 64 | 2.7500 | 2.7000 | +0.0500 |",
        "| student | layers | 100 | 5,000 | 9 | 3.5000 | 2.7000 | +0.8000 |",
        "| student | layers | 200 | 10,000 | 19 | 3.0000 | 2.7000 | +0.3000 |",
        "| student | converted | 4,096 | 30 | 40 | 75% |",
        "| run | model | rows | to 1,024 |",
        "| student | teacher | 8 | 2.5000 |",
        "| model | 1,024 tokens | 2,048 tokens |",
        "| student | 75% | not run |",
        "| teacher | not run | 100% |",
        "| teacher, whole cache | 2,048 | 32 |  | out of memory |  |  |",
        "| power | 2,048 | 32 | graph | 3,500 | 3.50x | 1 |",
        "| student | abc | pages | 4 | bits_per_byte | 1.235 |",
        "a GPU; torch 2, commit abc.",
    ):
        assert line in page


def test_a_page_without_rows_says_so():
    assert report([]).count("Not run yet.") == len(SECTIONS)


def test_the_committed_page_is_that_of_the_committed_rows(tmp_path):
    assert write_report(page=tmp_path / "page.md").read_text() == PAGE.read_text()
