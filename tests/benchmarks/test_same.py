"""The comparison of the results of two versions: what it calls equal, and what holds on for another version."""

from functools import partial

import pytest
import torch

from benchmarks import same
from benchmarks.common import code_hash as hashes
from benchmarks.common.measure import write
from sympow.ops import power_attention


def test_all_bits_count(call):
    """Of outputs, states and gradients. A scale that is one rounding larger changes them."""
    given = same.inputs("cpu", 20, 2, 1, 8, torch.float32)
    given.pop("beta")
    calls = [partial(same.results, power_attention, given, return_state=True, scale=s) for s in (0.5, 0.5 + 1e-7)]
    first, again, other = (same.digest(call, "cpu") for call in (calls[0], *calls))
    assert not same.differ(first, again) and same.differ(first, other) and same.differ(first, first[1:])
    assert len(calls[0]()) == 3 + 4  # out, s and z; q, k, v and log_g


def test_results_that_vary_do_not_count():
    count = iter(range(8))
    varying, steady = ((lambda: [torch.ones(2), torch.tensor(float(next(count)))]), lambda: [torch.ones(2)] * 2)
    first, again, other = (same.digest(call, "cpu") for call in (varying, varying, steady))
    assert not same.differ(first, again) and not same.differ(first, other) and not same.differ(other, first)
    assert same.differ(first, same.digest(lambda: [torch.zeros(2)] * 2, "cpu"))


def test_calls_have_names_of_their_own():
    names = [name for name, _ in same.calls("cpu")]
    assert len(set(names)) == len(names) > 40


def test_a_version_that_fails_is_refused(tmp_path, call, capsys):
    for folder in ("sympow", "sympow/ops"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise ImportError('the other version')\n")
    with pytest.raises(RuntimeError, match=f"a call of {tmp_path} failed"):
        call(same, "--base", tmp_path, "--device", "cpu", "--csv", tmp_path / "a")
    assert not (tmp_path / "a").exists()


LINE = {"device": "cuda", "calls": 9, "different": 0, "base": "a", "base_code": "of a", "commit": "b", "code": "of b"}


@pytest.fixture
def present(monkeypatch, tmp_path):
    """Returns a function that tells whether a row of commit "a" is of the present code, that of "c"."""
    monkeypatch.setattr(hashes, "SAME", tmp_path / "same.csv")
    monkeypatch.setattr(hashes, "code_hash", lambda part, commit=None: f"of {commit or 'c'}")
    monkeypatch.setattr(hashes, "run_hash", lambda part, commit=None: f"of {commit or 'c'}")

    def is_present(*lines, name="learning.csv", commit="a", **row):
        write(hashes.SAME, [LINE | line for line in lines])
        hashes.same_lines.cache_clear()
        part = hashes.part_of(name, {"processor": "NVIDIA H200"} | row)
        return hashes.is_present(part, commit, f"of {commit}")

    yield is_present
    hashes.same_lines.cache_clear()


TO_C = {"base": "b", "base_code": "of b", "commit": "c", "code": "of c"}


def test_a_line_in_which_only_generation_differs_holds_for_rows_that_do_not_generate(present):
    other = TO_C | {"generations_different": 3}
    assert present(other, commit="b") and present(other, name="decoding_h200.csv", commit="b")
    assert not present(other, name="decoding_models_h200.csv", commit="b")
    assert present(TO_C | {"generations_different": 0}, name="decoding_models_h200.csv", commit="b")
    assert present(TO_C, name="decoding_models_h200.csv", commit="b")


def test_rows_hold_for_versions_with_the_same_results(present):
    assert present(TO_C, commit="b") and present({}, TO_C) and present(TO_C, {})
    assert present({"base": "c", "base_code": "of c", "commit": "a", "code": "of a"})
    assert not present({"base": "c", "base_code": "of c", "commit": "a", "code": "of d"})
    assert not present({}) and not present(TO_C) and not present({}, TO_C, commit="d")


@pytest.mark.parametrize("change", [{"different": 1}, {"device": "cpu"}, {"base_code": "of d"}, {"code": "of d"}])
def test_lines_that_prove_nothing(present, change):
    assert not present(TO_C | change, commit="b")


def test_what_measures_the_host_is_measured_again(present):
    assert not present(TO_C, commit="b", name="host_h200.csv")
    on_cpu = TO_C | {"device": "cpu"}
    assert not present(on_cpu, commit="b", name="ops_cpu.csv", processor="AMD EPYC")


def test_a_line_is_of_one_kind_of_device(present):
    row = {"commit": "b", "name": "mqar_bits_cpu.csv", "processor": "AMD EPYC"}
    assert present(TO_C | {"device": "cpu"}, **row) and not present(TO_C, **row)
