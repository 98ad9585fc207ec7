"""Fixtures of the corpora' tests."""

import pytest


@pytest.fixture
def apt_get(tmp_path, monkeypatch):
    """apt_get(script) puts an apt-get on the path."""

    def install(script: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "apt-get").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    return install
