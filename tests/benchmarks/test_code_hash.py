"""What the hash of measured code depends on."""

import pytest

from benchmarks.common import code_hash

FILES = {
    "sympow/ops/a.py": '"""Adds."""\nfrom sympow.ops.b import two  # of b\n\nx = two + 1\n',
    "sympow/ops/b.py": "two = 2\n",
    "sympow/ops/c.py": "from sympow.ops import a\n",
}


def hashed(part, **changed):
    return code_hash.hash_of_files(part, FILES | {f"sympow/ops/{name}.py": source for name, source in changed.items()})


def test_it_is_of_a_part_and_all_it_imports():
    for part, own in (("sympow.ops.a", "ab"), ("sympow.ops.b", "b"), ("sympow.ops.c", "abc"), ("sympow.ops", "abc")):
        for name in "abc":
            other = hashed(part, **{name: FILES[f"sympow/ops/{name}.py"] + "y = 0\n"})
            assert (other != hashed(part)) == (name in own), (part, name)


def test_it_leaves_out_what_the_part_does_not_run():
    files = {
        "sympow/ops/triton/__init__.py": "from sympow.ops.power import call\n",
        "sympow/ops/power.py": "from sympow.ops import eager, reference\nfrom sympow.ops.checks import check\n",
        "sympow/ops/checks.py": "check = 1\n",
        "sympow/ops/eager.py": "from sympow.ops.monomials import basis\n",
        "sympow/ops/monomials.py": "basis = 1\n",
        "sympow/ops/reference.py": "x = 1\n",
    }
    for part, others in ((code_hash.KERNELS, ("eager", "monomials", "reference")), ("sympow.ops.power", ())):
        before = code_hash.hash_of_files(part, files)
        for name in ("power", "checks", "eager", "monomials", "reference"):
            path = f"sympow/ops/{name}.py"
            same = before == code_hash.hash_of_files(part, files | {path: files[path] + "y = 0\n"})
            assert same == (name in others), (part, name)


BARE = "from sympow.ops.b import two\nx = two + 1\n"


@pytest.mark.parametrize("same", [BARE, '"""Adds\n\nmore."""\n' + BARE])
def test_it_does_not_depend_on_comments_and_docstrings(same):
    assert hashed("sympow.ops.a", a=same) == hashed("sympow.ops.a")
    assert hashed("sympow.ops.a", a=same.replace("1", "'# 1'")) != hashed("sympow.ops.a")


@pytest.mark.parametrize("text", ["'# 1'", '"\\"# 1"', "'''\n'# 1'''", '"""\\""" # 1"""', "'' + '# 1'", "r'\\' # 1'"])
def test_no_comment_begins_in_a_string(text):
    source = f"x = {text}"
    assert hashed("sympow.ops.a", a=f"{source}  # of 'b'") == hashed("sympow.ops.a", a=source)
    assert hashed("sympow.ops.a", a=source.replace("1", "2")) != hashed("sympow.ops.a", a=source)


TRITON = {
    "sympow/ops/triton/adapt.py": "from sympow.ops.triton import decode, output\n",
    "sympow/ops/triton/decode.py": "def _rows(): return 1\n",
    "sympow/ops/triton/delta.py": "from sympow.ops.delta_solve import solve\n",
    "sympow/ops/triton/delta_step.py": "from sympow.ops.triton.decode import rows\n",
    "sympow/ops/triton/output.py": "tile = 1\n",
    "sympow/ops/delta_solve.py": "solve = 1\n",
    "sympow/ops/power.py": "call = 1\n",  # which the kernels do not import
}
STEP = "def step_with_tail(x):\n    return x\n"
POWER, DELTA = {"variant": "power"}, {"variant": "heads_delta"}


@pytest.mark.parametrize(
    ("name", "row", "run"),
    [
        ("learning.csv", POWER, {"adapt", "output", "power"}),
        ("learning.csv", DELTA, {"adapt", "output", "delta", "delta_solve", "power"}),
        ("decoding_h200.csv", POWER, {"adapt", "output", "decode", "power"}),
        ("delta_steps_gpu.csv", {}, {"adapt", "output", "delta", "delta_solve", "decode", "delta_step", "power"}),
        ("new.csv", POWER | {"mixers": "power_delta"},
         {"adapt", "output", "delta", "delta_solve", "decode", "delta_step", "power"}),
        ("new.csv", {"run": "gated-deltanet-n256", "label": "Gated DeltaNet", "mixers": "gated_delta_net {}"},
         {"adapt", "output", "decode", "power"}),
    ],
)  # fmt: skip
def test_what_a_row_runs(name, row, run):
    part = code_hash.part_of(name, row)
    before = code_hash.hash_of_run(part, TRITON)
    for path in TRITON:
        changed = before != code_hash.hash_of_run(part, TRITON | {path: TRITON[path] + "y = 0\n"})
        assert changed == (path.rsplit("/", 1)[1][:-3] in run), path


def test_a_row_without_steps_does_not_run_their_functions():
    adapt, path = TRITON["sympow/ops/triton/adapt.py"], "sympow/ops/triton/adapt.py"
    others = (adapt + STEP, adapt + STEP.replace("return x", "return 2 * x"), adapt + STEP + "y = 0\n")
    for name, same in (("learning.csv", [True, False]), ("decoding_h200.csv", [False, False])):
        part = code_hash.part_of(name, POWER)
        first, *found = (code_hash.hash_of_run(part, TRITON | {path: source}) for source in others)
        assert [each == first for each in found] == same


def test_the_underscore_of_a_name_does_not_count():
    part = code_hash.part_of("decoding_h200.csv", POWER)
    for decode, same in (("def rows(): return 1\n", True), ("def _rows(): return 2\n", False)):
        now = TRITON | {"sympow/ops/triton/decode.py": decode}
        assert (code_hash.hash_of_run(part, TRITON) == code_hash.hash_of_run(part, now)) == same


@pytest.mark.parametrize(
    ("code", "run", "present"),
    [
        ("now", "other", True),  # the whole code is the present one
        ("then", "now", True),  # the code of the commit, of which the row runs what did not change
        ("then", "other", False),
        ("modified", "now", False),  # not the code of the commit
        (None, "now", True),
        (None, "other", False),
        (None, None, False),  # git does not know the commit
    ],
)
def test_a_row_is_of_the_present_code_if_what_it_runs_is(monkeypatch, code, run, present):
    monkeypatch.setattr(code_hash, "code_hash", lambda part, commit=None: "then" if commit else "now")
    monkeypatch.setattr(code_hash, "run_hash", lambda part, commit=None: run if commit else "now")
    assert code_hash.is_present(code_hash.Part("sympow"), "a", code) == present


def test_files_of_the_checkout_and_of_commits():
    now = code_hash.code_hash()
    assert now is not None and len(now) == 12 and now != code_hash.code_hash("sympow.ops.eager")
    assert code_hash.code_hash("sympow.no_such_part") is None
    assert code_hash.code_hash(commit="no such commit") is None
