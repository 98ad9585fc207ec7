"""The benchmark of the server, with a very small model and hardly any load."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from benchmarks import serving
from benchmarks.common.server_process import Server
from benchmarks.pages.serving_tables import serving_table
from sympow.models import preset


def test_rows_and_their_table(tmp_path):
    run, options = tmp_path / "run", ("--slots", "2", "--cache-dir", str(tmp_path / "cache"))
    serving.untrained_run(run, preset("nano", 256))

    async def measured(server: Server, restarted: Callable) -> list[dict]:
        rows = await serving.prefix(server, restarted, 300)
        rows += [row async for row in serving.throughput(server, run, "cpu", [1, 2], 6, rounds=2)]
        rows += await serving.first_token(server, 6_000, repeats=2)
        rows += await serving.memory(server, 100)
        rows += await serving.hostile(server, 30, new=40)
        return rows + await serving.vanishing(server, 0.5, 3)

    server = Server(run, "cpu", *options)
    with ExitStack() as servers:
        servers.enter_context(server)  # stopped by `prefix` and started again, which serves the rest
        rows = asyncio.run(measured(server, lambda: nullcontext(servers.enter_context(server))))
    streams, firsts, (memory,), (hostile,), prefix, (left,) = (
        [row for row in rows if row["measure"] == name]
        for name in ("throughput", "first token", "memory", "hostile", "prefix", "vanishing")
    )
    assert [row["streams"] for row in streams] == [1, 2] and all(row["equal_to_alone"] for row in streams)
    assert [row["behind_tokens"] for row in firsts] == [0, 6_000]
    assert memory["prompt_tokens"] == 100 and memory["bytes_of_all_slots"] > 0
    assert hostile["all_4xx"] and hostile["other_answers_equal"] and hostile["alive"]
    assert [row["cached_tokens"] for row in prefix] == [0, 300, 300] and all(row["equal"] for row in prefix)
    assert (left["answers_wrong_or_lost"], left["exit_code"], left["faults"]) == (0, 0, 0)
    assert left["answers_whole_at_shutdown"] == left["answers_at_shutdown"] == 8 and left["all_slots_free_afterwards"]
    about = dict.fromkeys(("model", "processor", "torch", "commit"), "")
    written = serving_table([row | about for row in rows])
    assert "| 2 streams of 6 tokens | " in written and "0 wrong or lost" in written
    assert "hostile" not in serving_table([row | about for row in streams])


def test_a_server_that_does_not_start_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="the server did not start: exit code 2"), Server(tmp_path, "cpu"):
        pass


def test_what_is_no_answer_has_status_0():
    class Listens(Server):
        host = "127.0.0.1"

    async def asked() -> tuple[int, bytes]:
        async def silent(reader, writer):
            writer.close()

        listening = await asyncio.start_server(silent, "127.0.0.1", 0)
        server = Listens(None, "cpu")
        server.port = listening.sockets[0].getsockname()[1]
        async with listening:
            return await server.send("GET", "/")

    assert asyncio.run(asked()) == (0, b"")
