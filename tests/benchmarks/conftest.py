"""A fixture of the benchmarks' tests."""

import pytest


@pytest.fixture
def call(monkeypatch):
    """call(program, *words) runs the command of a module with these words, and returns its exit status."""

    def run(program, *words):
        monkeypatch.setattr("sys.argv", [program.__name__, *map(str, words)])
        return program.main()

    return run
