"""Long prose without a network: the manuals in Debian's documentation packages, in the layout of LongCrawl64.

A document is a directory of a manual. Its text is that of the pages directly in it, in the manual's order. A directory
with less text than four bytes for each token of a row joins the directory above it in its package; so a document also
holds the small directories below. `manuals.py` tells what of a package is read.

A page is left out if at least half of its text, in lines of 40 characters or more, occurs in earlier pages. Such pages
are other versions of a manual, or other forms of the same page. Packages are read in the order of their names.

`PACKAGES`, at the end of this file, lists the packages. Packages whose names differ in digits only are held out
together or trained on together. They are taken in the order of a hash of their names, if they still fit, until 5% of
the text is held out. `packages.jsonl` in the corpus contains every package's version, licences, a hash of its pages,
and the number of its pages in the corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sympow.data.builders.corpus_folder import ROW_TOKENS, VOCAB_SIZE, write_corpus
from sympow.data.builders.debian_package import fetch_package
from sympow.data.builders.manuals import Manuals, read_manuals
from sympow.data.builders.sources import SourceDocument, choose_held_out, join_small
from sympow.data.tokens import Tokenizer
from sympow.files import digest, write_text
from sympow.progress import Progress

MANIFEST = "packages.jsonl"

_SMALLEST = 4  # bytes of text per token of a row, about as in prose, so that nearly every document fills a row
_LINE = 40  # characters of a line that tells pages apart
_REPEATED = 0.5  # of a page's text in such lines
# The version of the rules here and in manuals.py. Change it if the rules make another corpus from the same source.
_VERSION = "manuals-1"


def build_doc_corpus(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Tokenizer | None = None,
    row_tokens: int = ROW_TOKENS,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes the corpus of manuals into the folder `out`, or continues it, as `write_corpus` does.

    Args:
        out: the folder: a new one, or one that an earlier call with the same arguments started.
        source: a folder with Debian packages; by default those of `PACKAGES`, by `apt-get download`.
        vocab_size: tokens of the BPE, 256 to 65,536; a small source may give fewer.
        tokenizer: used instead of a BPE trained on the corpus, such as the tokenizer of a model to distil.
        row_tokens: the number of tokens in a row.
        progress: whether to show the progress on stderr, see `Progress`.

    Returns the content of `corpus.json`. Raises the errors of `write_corpus`; ValueError also for a source without
    packages or with damaged ones; FileNotFoundError for a missing source; RuntimeError if a package cannot be fetched.
    """

    def open_source(partial: Path) -> _Packages:
        files = _fetched(partial / "packages", progress) if source is None else _in_folder(Path(source))
        return _Packages(partial, files, row_tokens, progress)

    words = {"vocab_size": vocab_size} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
    settings = {"version": _VERSION, "row_tokens": row_tokens, "words": words}
    return write_corpus(
        out, settings, open_source, row_tokens=row_tokens, vocab_size=vocab_size, tokenizer=tokenizer, kept={MANIFEST}
    )


def _fetched(folder: Path, progress: bool) -> list[Path]:
    with Progress("fetching", "package", total=len(PACKAGES), quiet=not progress) as task:
        files = []
        for name in PACKAGES:
            files.append(fetch_package(name, folder / name))
            task.advance()
    return files


def _in_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"source is no folder with Debian packages: {folder}")
    files = sorted(folder.glob("*.deb"))
    if not files:
        raise ValueError(f"source {folder} is empty: no Debian package (*.deb) in it")
    return files


class _Packages:
    """Gives the pages of all packages. Pages that were read stay in the corpus's folder until it is finished."""

    def __init__(self, partial: Path, packages: Sequence[Path], row_tokens: int, progress: bool):
        self._partial, self._packages, self._row_tokens, self._progress = partial, packages, row_tokens, progress
        self._read: dict[str, Path] = {}  # what was read of each package, in the order of their names
        self.sizes: dict[str, int] = {}  # bytes of each page by path, in reading order, once surveyed

    def survey(self) -> str:
        self._read_all()
        seen: set[bytes] = set()
        lines, hashes = [], []
        with self._reading("looking through") as progress:
            for manuals in self._manuals(progress):
                hashes.append(digest(part for page in manuals.pages for part in page))
                kept = [(path, text) for path, text in manuals.pages if _is_new(text, seen)]
                self.sizes |= {path: len(_page(text).encode()) for path, text in kept}
                lines.append({
                    "package": manuals.package,
                    "version": manuals.version,
                    "licences": manuals.licences,
                    "hash": hashes[-1],
                    "pages": len(kept),
                    "duplicates": len(manuals.pages) - len(kept),
                    "bytes": sum(self.sizes[path] for path, _ in kept),
                })  # fmt: skip
        if not self.sizes:
            raise ValueError("the source is empty: no page of English text in its packages")
        write_text(self._partial / MANIFEST, "".join(f"{json.dumps(line)}\n" for line in lines))
        return digest([json.dumps(lines)])

    def plan(self) -> list[SourceDocument]:
        files = join_small(self.sizes, _SMALLEST * self._row_tokens, top=1)
        kept = {directory: sum(self.sizes[name] for name in names) for directory, names in files.items()}
        held_out = choose_held_out(kept, package_family, "more packages with manuals")
        rank = {name: place for place, name in enumerate(self.sizes)}
        documents = [
            SourceDocument(each, tuple(sorted(names, key=rank.__getitem__)), kept[each], each in held_out)
            for each, names in files.items()
        ]
        return sorted(documents, key=lambda document: rank[document.files[0]])

    def sample(self, files: Collection[str]) -> Iterator[str]:
        with self._reading("training the tokenizer") as progress:
            for manuals in self._manuals(progress):
                yield from (_page(text) for path, text in manuals.pages if path in files)

    def texts(self, documents: Sequence[SourceDocument], start: int) -> Iterator[tuple[SourceDocument, str]]:
        of_package: dict[str, list[SourceDocument]] = defaultdict(list)
        for document in documents[start:]:
            of_package[_package(document.directory)].append(document)
        with self._reading("tokenizing") as progress:
            for manuals in self._manuals(progress):
                texts = dict(manuals.pages) if manuals.package in of_package else {}
                for document in of_package[manuals.package]:
                    yield document, "".join(_page(texts[path]) for path in document.files)

    def _reading(self, task: str) -> Progress:
        return Progress(task, "package", total=len(self._packages), quiet=not self._progress)

    def _read_all(self) -> None:
        with self._reading("reading") as progress:
            for package in self._packages:
                self._read[package.name] = keep_manuals(package, self._partial / "manuals")
                progress.advance(note=package.name.partition("_")[0])

    def _manuals(self, progress: Progress) -> Iterator[Manuals]:
        for name in sorted(self._read):
            fields = json.loads(self._read[name].read_bytes())
            pages = tuple((path, text) for path, text in fields.pop("pages"))
            yield Manuals(pages=pages, licences=tuple(fields.pop("licences")), **fields)
            progress.advance(note=name.partition("_")[0])


def keep_manuals(package: Path, folder: Path) -> Path:
    """Returns the file with the manuals of a package, named by a hash of the package; writes it if it is not there."""
    with package.open("rb") as file:
        kept = folder / f"{hashlib.file_digest(file, 'blake2b').hexdigest()[:32]}.json"
    if not kept.exists():
        write_text(kept, json.dumps(asdict(read_manuals(package))))
    return kept


def _page(text: str) -> str:
    """Returns a page's text as a part of a document, with an empty line before the next page."""
    return f"{text}\n"


def _package(directory: str) -> str:
    return directory.partition("/")[0]


def package_family(directory: str) -> str:
    """Returns what the versions of a package have in common: its name without digits."""
    return re.sub(r"[\d.]+", "", _package(directory))


def _is_new(text: str, seen: set[bytes]) -> bool:
    """Returns whether less than half of a page's text, by its long lines, is in `seen`; then adds its lines."""
    lines = [line.strip() for line in text.splitlines()]
    long = {hashlib.blake2b(line.encode(), digest_size=8).digest(): len(line) for line in lines if len(line) >= _LINE}
    repeated = sum(length for line, length in long.items() if line in seen)
    if repeated and repeated >= _REPEATED * sum(long.values()):
        return False
    seen.update(long)
    return True


# Those of Debian 12.
PACKAGES = (
    "abinit-doc", "ada-reference-manual-2012", "alpine-doc", "anarchism", "ant-doc", "aodh-doc", "apache2-doc",
    "apt-doc", "aptitude-doc-en", "autoconf-doc", "bacula-doc", "barbican-doc", "bash-doc", "bind9-doc", "buildbot-doc",
    "ceilometer-doc", "cinder-doc", "clang-14-doc", "clisp-doc", "cmake-doc", "corosync-doc", "courier-doc",
    "cppreference-doc-en-html", "csound-doc", "cyrus-doc", "cython-doc", "dar-docs", "db5.3-doc", "debian-edu-doc-en",
    "debian-faq", "debian-handbook", "debian-history", "debian-policy", "debian-reference-en", "debmake-doc",
    "derby-doc", "designate-doc", "developers-reference", "docbook-xsl-doc-html", "docker-doc", "docutils-doc",
    "dolfin-doc", "dpdk-doc", "drbd-doc", "efl-doc", "erlang-doc", "exim4-doc-html", "fai-doc", "festival-doc",
    "ffmpeg-doc", "firebird3.0-doc", "fltk1.3-doc", "fop-doc", "fp-docs-3.2.2", "freedombox-doc-en", "freefem-doc",
    "ganeti-doc", "gap-doc", "geographiclib-doc", "ghc-doc", "giac-doc", "gimp-help-en", "git-doc", "glance-doc",
    "gnumed-doc", "gnuplot-doc", "gradle-doc", "graphviz-doc", "grass-doc", "gretl-doc", "groonga-doc", "groovy-doc",
    "haproxy-doc", "harden-doc", "heat-doc", "icinga2-doc", "imagemagick-6-doc", "installation-guide-amd64",
    "ironic-doc", "jython-doc", "kannel-docs", "keystone-doc", "kicad-doc-en", "krb5-doc", "lazarus-doc-2.2",
    "libboost1.81-doc", "libeigen3-doc", "libglib2.0-doc", "libgtk-3-doc", "libgtk-4-doc", "libreoffice-help-en-us",
    "libsdl2-doc", "libsvn-doc", "libvirt-doc", "lighttpd-doc", "lilypond-doc-html", "linux-doc-6.1",
    "live-manual-html", "live-manual-txt", "llvm-14-doc", "mailman3-doc", "maint-guide", "manila-doc", "mapserver-doc",
    "maxima-doc", "menhir-doc", "murano-doc", "neutron-doc", "ngspice-doc", "nodejs-doc", "nova-doc", "ns3-doc",
    "numba-doc", "octave-doc", "octavia-doc", "openafs-doc", "opencv-doc", "openjdk-17-doc", "openmpi-doc",
    "openscap-doc", "openvswitch-doc", "orthanc-doc", "pacemaker-doc", "petsc3.18-doc", "pike8.0-doc", "plplot-doc",
    "postfix-doc", "postgis-doc", "postgresql-doc-15", "povray-doc", "privoxy", "puredata-doc", "pypy3-doc",
    "python-aiohttp-doc", "python-ase-doc", "python-astropy-doc", "python-babel-doc", "python-biopython-doc",
    "python-brian-doc", "python-celery-doc", "python-cogent-doc", "python-cryptography-doc", "python-dask-doc",
    "python-dipy-doc", "python-django-doc", "python-eventlet-doc", "python-flask-doc", "python-gevent-doc",
    "python-greenlet-doc", "python-h5py-doc", "python-hypothesis-doc", "python-ipython-doc", "python-jinja2-doc",
    "python-kombu-doc", "python-lxml-doc", "python-mpmath-doc", "python-nibabel-doc", "python-nipype-doc",
    "python-notebook-doc", "python-openstackclient-doc", "python-pandas-doc", "python-pil-doc", "python-psycopg2-doc",
    "python-pyfai-doc", "python-pygments-doc", "python-pymatgen-doc", "python-pymongo-doc", "python-pyqtgraph-doc",
    "python-pyside2-doc", "python-pytest-doc", "python-qutip-doc", "python-reportlab-doc", "python-scipy-doc",
    "python-setuptools-doc", "python-sfepy-doc", "python-sip-doc", "python-skbio-doc", "python-skimage-doc",
    "python-sklearn-doc", "python-sqlalchemy-doc", "python-statsmodels-doc", "python-sympy-doc", "python-tables-doc",
    "python-tornado-doc", "python-werkzeug-doc", "python-xarray-doc", "python-xraylarch-doc", "python3.11-doc",
    "qtbase5-doc-html", "qtdeclarative5-doc-html", "r-doc-html", "racket-doc", "rdkit-doc", "rheolef-doc", "rust-doc",
    "sagemath-doc", "sahara-doc", "sasview-doc", "sbcl-doc", "sendmail-doc", "senlin-doc", "shorewall-doc",
    "singular-doc", "slurm-wlm-doc", "smlnj-doc", "speech-tools-doc", "sphinx-doc", "sqlite3-doc", "sumo-doc",
    "swi-prolog-doc", "swift-doc", "systemtap-doc", "tomcat10-docs", "trove-doc", "twisted-doc", "uima-doc",
    "varnish-doc", "vim-doc", "watcher-doc", "wx3.2-doc", "zsh-doc",
)  # fmt: skip
