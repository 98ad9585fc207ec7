"""Small source trees in the shape of the kernel's, and the files that hold one."""

import io
import random
import tarfile
from pathlib import Path

WORDS = ("int", "return", "if (x)", "struct device", "x = 3;", "/* ± */", "\n", "\t")


def source_tree() -> dict[str, bytes]:
    """Paths and contents: 36 directories of text, small ones below, and what is to be left out."""
    rng = random.Random(0)

    def text(words: int) -> bytes:
        return " ".join(rng.choice(WORDS) for _ in range(words)).encode()

    files = {
        f"{top}/{middle}-{n}/{leaf}/{name}": text(80)
        for top in ("arch", "drivers", "drivers-more")
        for middle in ("a", "b")
        for n in range(3)
        for leaf in ("x", "y")
        for name in ("Kconfig", "core.c", "core.h")
    }
    files |= {f"drivers/small/{n}/file.c": text(3) for n in range(4)}  # all of them together are a small directory
    files |= {"Makefile": text(5), "drivers/Makefile": text(5), "lib/latin.c": b"/* caf\xe9 */\n", "lib/empty.c": b""}
    files |= {".gitignore": b"*.o\n", "lib/.hidden/file.c": text(80), "lib/logo.gif": b"GIF\0" + text(80)}
    files |= {f"drivers/gpu/include/asic_reg/{n}.h": text(80) for n in range(3)}
    return files


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_archive(path: Path, files: dict[str, bytes], top: str = "linux-source-6.1/", mode: str = "w:xz") -> Path:
    """A tar archive, in the order of `files`, with a folder and a link as the kernel's has them."""
    with tarfile.open(path, mode) as archive:
        for name, kind in ((top or "folder", tarfile.DIRTYPE), (f"{top}a-link", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "Makefile"
            archive.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_package(path: Path, data: Path, name: str = "./usr/src/linux-source-6.1.tar.xz") -> Path:
    """A Debian package that installs the file `data` as `name`."""
    return write_deb(path, {"./usr/share/doc/copyright": b"GPL\n", name: data.read_bytes()}, "Package: linux\n")


def write_deb(path: Path, files: dict[str, bytes], control: str) -> Path:
    """A Debian package that installs `files`."""
    members = {"debian-binary": b"2.0\n"}
    for name, held in (("control.tar.xz", {"./control": control.encode()}), ("data.tar.xz", files)):
        members[name] = write_archive(path.with_suffix(".tar"), held, top="").read_bytes()
    path.with_suffix(".tar").unlink()
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for member, content in members.items():
            file.write(f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
