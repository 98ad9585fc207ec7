"""An error of several ranks is printed once."""

from datetime import timedelta

from torch.distributed import TCPStore

from sympow.cli import main


def set_rank(monkeypatch, port: int) -> None:
    names = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (names | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)


def test_ranks_print_an_error_once(monkeypatch, capsys):
    """Every call is one rank's. torchrun's store is in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_rank(monkeypatch, store.port)

    def errors(*words) -> str:
        try:
            assert main(words) == 2
        except SystemExit as end:
            assert end.code == 2
        return capsys.readouterr().err

    missing = ("train", "--from", "nothing")
    assert errors(*missing) == "sympow: error: no run and no checkpoint at nothing\n"
    assert errors(*missing) == ""
    assert errors("train", "--fast").count("\n") == 1
    assert errors("train", "--fast") == ""
    assert errors("train").count("\n") == 1 and errors("train") == ""
    assert "other" in errors("train", "other.py:run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert errors(*missing) != ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert errors(*missing) != "" and errors(*missing) != ""


def test_ranks_whose_store_is_gone_print_their_errors(monkeypatch, capsys):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    set_rank(monkeypatch, port)
    monkeypatch.setattr("sympow.cli.options.WAIT", timedelta(seconds=1))
    assert main(["train", "other.py:run"]) == 2
    assert capsys.readouterr().err.startswith("sympow: error: ")
