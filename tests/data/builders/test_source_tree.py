import os
import random

import pytest

from sympow.data.builders.source_tree import read_files
from tests.data.builders.trees import source_tree, write_archive, write_folder, write_package

FILES = source_tree()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archives_are_read_in_their_order(tmp_path, mode):
    names = random.Random(0).sample(sorted(FILES), len(FILES))
    archive = write_archive(tmp_path / "linux", {name: FILES[name] for name in names}, mode=mode)
    assert list(read_files(archive)) == [(name, FILES[name]) for name in names]


def test_packages_are_read_through(tmp_path):
    package = write_package(tmp_path / "a.deb", write_archive(tmp_path / "linux.tar.xz", FILES))
    assert dict(read_files(package)) == FILES


def test_folders_are_read_sorted_without_links_and_hidden_files(tmp_path):
    folder = write_folder(tmp_path / "linux", FILES)
    os.symlink(folder / "Makefile", folder / "link.c")
    shown = {name: data for name, data in FILES.items() if "/." not in f"/{name}"}
    assert list(read_files(folder)) == sorted(shown.items())


@pytest.mark.parametrize("cut", ["in a file", "between files", "in the compressed stream"])
def test_an_archive_that_breaks_off_is_refused(tmp_path, cut):
    """Between two files too, where the tarfile module sees an end."""
    files = {"a.c": b"a" * 512, "b.c": b"b" * 512}
    whole = write_archive(tmp_path / "a.tar", files, mode="w" if cut != "in the compressed stream" else "w:xz")
    data = whole.read_bytes()
    whole.write_bytes(data[: {"in a file": 2700, "between files": 2048}.get(cut, len(data) // 2)])
    with pytest.raises(ValueError, match=r"^source .*a\.tar: expected a tar archive or a Debian package, got "):
        list(read_files(whole))


def test_sources_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^source does not exist: "):
        list(read_files(tmp_path / "none"))
    (tmp_path / "text").write_text("no archive" * 100)
    with pytest.raises(ValueError, match="text: expected a tar archive or a Debian package, got"):
        list(read_files(tmp_path / "text"))
    archive = write_archive(tmp_path / "two", {"a/a.c": b"a", "b/b.c": b"b"}, top="")
    with pytest.raises(ValueError, match=r"two: expected one folder in the archive, a, got also b/b\.c$"):
        list(read_files(archive))
    with pytest.raises(ValueError, match=r"loose: expected one folder in the archive, a\.c, got also a\.c$"):
        list(read_files(write_archive(tmp_path / "loose", {"a.c": b"a"}, top="")))


def test_packages_that_do_not_fit_are_refused(tmp_path):
    other = write_package(tmp_path / "other.deb", write_archive(tmp_path / "a", FILES), name="./usr/share/a.tar.xz")
    with pytest.raises(ValueError, match=r"other\.deb: no archive in the package's /usr/src"):
        list(read_files(other))
    data = other.read_bytes()
    other.write_bytes(data[:70])
    with pytest.raises(ValueError, match=r"other\.deb: expected a Debian package, got an archive without data\.tar"):
        list(read_files(other))
    other.write_bytes(data[:8] + b"nonsense" * 10)
    with pytest.raises(ValueError, match=r"other\.deb: damaged after 68 bytes, expected the header of a member"):
        list(read_files(other))
