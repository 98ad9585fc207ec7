"""Debian packages: fetched by apt-get, and read without unpacking them to disk."""

from __future__ import annotations

import gzip
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MAGIC = b"!<arch>\n"
DAMAGE = (tarfile.TarError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError)  # of an archive


def fetch_package(name: str, folder: Path) -> Path:
    """Fetches the package of this name into a folder of its own, or finds it there.

    Raises RuntimeError if apt-get is not there or fails.
    """
    if not folder.exists():
        fresh = folder.with_name(f"{folder.name}.fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            done = subprocess.run(["apt-get", "download", name], cwd=fresh, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError(f"no apt-get to fetch {name}: give what it holds as --source") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RuntimeError(f"apt-get download {name} failed: {reason}")
        fresh.replace(folder)
    found = sorted(folder.glob("*.deb"))
    if len(found) != 1:
        raise RuntimeError(f"expected one package in {folder}, got {len(found)}: remove that folder")
    return found[0]


def control_fields(path: Path) -> dict[str, str]:
    """Reads the control fields of a package, such as Package and Version. Only fields of one line are read.

    Raises ValueError for a file that is damaged or no package.
    """
    with package_archive(path, "control.tar") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.removeprefix("./") == "control" else None
            if content is not None:
                lines = content.read().decode("utf-8", errors="replace").splitlines()
                return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines)
                        if colon and not name.startswith((" ", "\t"))}  # fmt: skip
    raise ValueError(f"source {path}: expected a Debian package, got one without a control file")


@contextmanager
def package_archive(path: Path, name: str) -> Iterator[tarfile.TarFile]:
    """Opens one of the two archives in a package, data.tar or control.tar, to be read from beginning to end.

    Raises ValueError for a file that is damaged or no package, also where the archive is read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"source {path}: expected a Debian package, got another kind of file")
            _seek_member(file, path, name)
            with tarfile.open(fileobj=file, mode="r|*") as archive:
                yield archive
    except DAMAGE as error:
        raise ValueError(f"source {path}: expected a Debian package, got {error}") from None


def _seek_member(file: IO[bytes], path: Path, name: str) -> None:
    """Moves to the beginning of a member of the package, which is an `ar` archive."""
    while header := file.read(60):
        member, size = header[:16].rstrip(b" /"), header[48:58].strip()
        if not size.isdigit():
            raise ValueError(f"source {path}: damaged after {file.tell()} bytes, expected the header of a member")
        if member.startswith(name.encode()):
            if file.tell() + int(size) > os.fstat(file.fileno()).st_size:
                raise ValueError(f"source {path}: damaged, it ends within {name}")
            return
        file.seek(int(size) + int(size) % 2, os.SEEK_CUR)
    raise ValueError(f"source {path}: expected a Debian package, got an archive without {name}")
