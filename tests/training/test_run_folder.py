"""A run folder that is open in one process is kept from others, where its file system has locks."""

import errno
import fcntl
import os

import pytest

from sympow.training import run, train
from sympow.training.run_folder import clear_run_folder, open_run_folder


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_open_folder_cannot_be_opened_again(tmp_path, make_config, make_batches):
    config, folder = make_config(steps=2), tmp_path / "run"
    with open_run_folder(folder, config):
        held = names(folder)
        refused = pytest.raises(
            RuntimeError, match=rf"^{folder} is in use, another process trains there: wait for it, "
        )
        with refused:
            train(config, make_batches(config), folder, quiet=True)
        with refused:
            run(config, folder, restart=True, quiet=True)
        assert names(folder) == held
    assert train(config, make_batches(config), folder, quiet=True).step == 2


def test_a_folder_of_something_else_is_not_locked(tmp_path, make_config):
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(FileExistsError, match="holds other things than a run"),
        open_run_folder(tmp_path, make_config()),
    ):
        pass
    assert names(tmp_path) == ["thesis.tex"]


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(
    tmp_path, make_config, make_batches, monkeypatch, capsys
):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = make_config(steps=2)
    assert train(config, make_batches(config), tmp_path / "run", quiet=True).step == 2
    line = "cannot be locked (No locks available): do not start the same command twice at the same time"
    assert capsys.readouterr().err == f"{tmp_path / 'run'} {line}\n"


@pytest.mark.parametrize("restart", [False, True])
def test_a_config_of_something_else_is_left_alone(tmp_path, make_config, restart):
    """As that of a tokenizer or a model of the Hub."""
    for name, text in (("config.json", '{"model_type": "llama"}'), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
    with pytest.raises(FileExistsError, match="holds other things than a run"):
        run(make_config(), tmp_path, restart=restart, quiet=True)
    with pytest.raises(FileNotFoundError, match=r"its config\.json is of no run, so nothing in it is removed"):
        clear_run_folder(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}' and len(names(tmp_path)) == 2
