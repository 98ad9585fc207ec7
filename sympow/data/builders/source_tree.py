"""The files of a source tree: from a folder, a tar archive, or a Debian package that holds one."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sympow.data.builders.debian_package import DAMAGE, MAGIC, package_archive
from sympow.data.text import files_below

_PACKAGED = re.compile(r"(\./)?usr/src/[^/]+\.tar\.(xz|gz|bz2)")


def read_files(source: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    """Yields the path and content of every regular file.

    Nothing is unpacked to disk.

    Paths are relative to the top of the tree, with forward slashes. Files come in the archive's order; those of a
    folder sorted, without hidden ones. Links are left out.

    Args:
        source: a folder, which is the top of the tree; or a tar archive (also .xz, .gz, .bz2) with the tree in one
            folder; or a Debian package with such an archive in /usr/src, as linux-source packages are.

    Raises FileNotFoundError for a missing source, ValueError for a file that is damaged or is none of these.
    """
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"source does not exist: {path}")
    if path.is_dir():
        for name in files_below(path, suffixes=()):
            if not (path / name).is_symlink():
                yield name, (path / name).read_bytes()
        return
    try:
        with path.open("rb") as file:
            packaged = file.read(len(MAGIC)) == MAGIC
            if not packaged:
                file.seek(0)
                yield from _read_archive(file, path)
        if packaged:
            yield from _read_package(path)
    except DAMAGE as error:
        raise ValueError(f"source {path}: expected a tar archive or a Debian package, got {error}") from None


def _read_package(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a Debian package that has the archive of the tree in /usr/src."""
    with package_archive(path, "data.tar") as package:
        for member in package:
            content = package.extractfile(member) if _PACKAGED.fullmatch(member.name) else None
            if content is not None:
                yield from _read_archive(content, path)
                return
    raise ValueError(f"source {path}: no archive in the package's /usr/src")


def _read_archive(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    top = None
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                continue
            folder, slash, name = member.name.removeprefix("./").partition("/")
            top = folder if top is None else top
            if not slash or folder != top:
                raise ValueError(f"source {path}: expected one folder in the archive, {top}, got also {member.name}")
            yield name, content.read()
        # tarfile takes an archive that breaks off between two files for a whole one; a whole one ends in two blocks of
        # zeros, of which it has read the first
        if archive.fileobj is None or archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("unexpected end of data")
