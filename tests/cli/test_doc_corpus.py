"""`sympow doc-corpus`: a corpus with a tokenizer of its own or one that is given."""

import pytest

from sympow.cli import main
from sympow.data import load_tokenizer
from sympow.data.tokens import BPETokenizer
from tests.data.builders.test_doc_corpus import write_packages


@pytest.fixture
def words(tmp_path):
    """The command, for rows of 64 tokens."""
    source = write_packages(tmp_path / "debs")
    return ["doc-corpus", "--out", f"{tmp_path}/docs", "--source", str(source), "--row-tokens", "64", "--quiet"]


def test_the_corpus_is_made_with_the_given_tokenizer_and_drawn(words, tmp_path, capsys):
    given = BPETokenizer.train(["the text that one can read"], 280)
    given.save(tmp_path / "tokenizer.json")
    assert main([*words, "--tokenizer", str(tmp_path), "--plot", f"{tmp_path}/lengths.png"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"{tmp_path}/docs/train.zarr: ") and len(out.splitlines()) == 2
    assert load_tokenizer(tmp_path / "docs").fingerprint == given.fingerprint
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_errors_are_one_line(words, tmp_path, capsys):
    for more, line in (
        (["--tokenizer", f"{tmp_path}/no"], f"tokenizer file does not exist: {tmp_path}/no"),
        (["--source", "nowhere"], "source is no folder with Debian packages: nowhere"),
        (["--vocab-size", "100"], "vocab_size must be 256 to 65,536, as tokens are uint16; got 100"),
    ):
        assert main([*words, *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err == f"sympow: error: {line}\n"
    assert not (tmp_path / "docs").exists()
