"""Debian packages, fetched and read."""

import pytest

from sympow.data.builders.debian_package import fetch_package


def test_a_package_that_cannot_be_fetched(tmp_path, apt_get, monkeypatch):
    apt_get("echo begun > half.deb; echo W: first >&2; echo 'E: Unable to locate package' >&2; exit 100")
    for _ in range(2):  # what a failure leaves is not taken for the package
        with pytest.raises(RuntimeError, match=r"^apt-get download linux-doc failed: E: Unable to locate"):
            fetch_package("linux-doc", tmp_path / "package")
    apt_get("exit 0")
    with pytest.raises(RuntimeError, match=r"^expected one package in .*package, got 0: remove that folder$"):
        fetch_package("linux-doc", tmp_path / "package")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match=r"^no apt-get to fetch linux-doc: give what it holds as --source$"):
        fetch_package("linux-doc", tmp_path / "other")
