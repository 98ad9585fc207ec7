"""The server under load: `python -m benchmarks.serving --device cpu --json FILE`.

A server is started as a process of its own, on an untrained model of bytes (what it answers costs as much as what a
trained one answers), and clients ask it over HTTP. Times are taken at the client. Of the throughput, the first 16
answers are compared with those to the same prompts alone. The file is written anew after every measure.

- throughput: tokens a second by streams at a time, and of `generate` with that batch in this process.
- first token: time to it, with an idle server and behind a prompt of 100,000 tokens that is being read.
- prefix: time to the first token of a prompt that is new, and of the same again; and after a restart, from the disk.
- memory: what the process holds at most while it answers a prompt of so many tokens, beyond what it held before.
- hostile: requests that must be refused, beside a stream that must not notice.
- vanishing: clients that leave at any moment, beside others whose answers must be whole; then an orderly end.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.hostile_requests import NO_HTTP, hostile_requests
from benchmarks.measure import commit, options, processor, write
from benchmarks.server_process import NAME, Server, Streamed
from sympow.data import ByteTokenizer, DataConfig
from sympow.models import LanguageModel, ModelConfig, generate, preset
from sympow.training import Checkpoint, RunConfig, TrainingConfig, load, save_checkpoint

SHORT = 128  # tokens of a short prompt
COMPARED = 16  # answers


def untrained_run(folder: Path, config: ModelConfig) -> None:
    """Writes a run folder whose model reads bytes and draws various tokens."""
    model = LanguageModel(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.empty(parameter.shape).normal_(0, 0.05, generator=generator))
        # With a tied head the likeliest token would always be the last one.
        model.final_norm.weight.copy_(torch.empty(config.d_model).normal_(generator=generator))
    data = DataConfig(kind="text", path=".", tokenizer="bytes")
    run = RunConfig(NAME, config, data, TrainingConfig(context=64, batch_size=1, steps=1, warmup_steps=1)).to_dict()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(run))
    ByteTokenizer().save(folder / "tokenizer.json")
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    empty: dict[str, Any] = {"optimizer": {}, "data": {}, "rng": {}}
    save_checkpoint(Checkpoint(run, weights, step=1, tokens=0, seconds=0.0, **empty), folder, 1)


def prompt_of(length: int, seed: int) -> str:
    """Returns random letters. Each letter is a token."""
    rng = random.Random(seed)
    return "".join(chr(rng.randrange(97, 123)) for _ in range(length))


async def throughput(server: Server, run: Path, device: str, streams: list[int], new: int) -> list[dict]:
    """Returns a row for each number of streams. Each rate is the best of three rounds."""
    most = max(streams)
    prompts = [prompt_of(SHORT + i, i) for i in range(most)]
    alone = [(await server.stream(prompt, new)).text for prompt in prompts[:COMPARED]]
    rates: dict[int, list[float]] = {count: [] for count in streams}
    generated: dict[int, list[float]] = {count: [] for count in streams}
    equal = dict.fromkeys(streams, True)
    for _ in range(3):  # in turns, so that a machine that slows down does so for all rows
        for count in streams:
            began = time.perf_counter()
            answers = await asyncio.gather(*(server.stream(prompt, new) for prompt in prompts[:count]))
            rates[count].append(count * new / (time.perf_counter() - began))
            equal[count] &= [each.text for each in answers[:COMPARED]] == alone[:count]
            generated[count].append(_generated(run, device, count, new))
    return [
        {
            "measure": "throughput",
            "streams": count,
            "new_tokens": new,
            "tokens_per_second": max(rates[count]),
            "equal_to_alone": equal[count],
            "tokens_per_second_generate": max(generated[count]),
        }
        for count in streams
    ]


def _generated(run: Path, device: str, batch: int, new: int) -> float:
    model = _loaded(run, device)
    prompt = torch.tensor([list(prompt_of(SHORT, i).encode()) for i in range(batch)])
    return generate(model, prompt, new, temperature=0).tokens_per_second


@lru_cache(maxsize=1)
def _loaded(run: Path, device: str) -> LanguageModel:
    return load(run, device).model


async def first_token(server: Server, long: int, repeats: int = 9) -> list[dict]:
    """Returns a row for an idle server and a row for a server that reads a long prompt."""
    rows = []
    for behind in (0, long):
        other = asyncio.ensure_future(server.stream(prompt_of(behind, 999), 1)) if behind else None
        while other is not None and not await server.gauge("sympow_reading"):
            await asyncio.sleep(0.01)
        times = []
        for i in range(repeats):
            times.append((await server.stream(prompt_of(SHORT, 1000 + behind + i), 2)).first or float("nan"))
            await asyncio.sleep(0.05)
        still = other is not None and not other.done()
        if other is not None:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await server.idle()
        middle = {"seconds_to_first_token": statistics.median(times), "most_seconds": max(times)}
        row = {"measure": "first token", "behind_tokens": behind, "still_reading": still, "repeats": repeats}
        rows.append(row | middle)
    return rows


async def prefix(server: Server, restarted: Callable[[], Server], length: int) -> list[dict]:
    """Returns rows for a new prompt, for the same prompt again, and for the same prompt after a restart."""
    rows, prompt = [], prompt_of(length, 7)

    def row(kind: str, answer: Streamed) -> dict:
        cached = (answer.usage or {})["prompt_tokens_details"]["cached_tokens"]
        held = {"prompt_tokens": length, "cached_tokens": cached, "seconds_to_first_token": answer.first}
        return {"measure": "prefix", "kind": kind, "text": answer.text} | held

    rows.append(row("new", await server.stream(prompt, 8)))
    rows.append(row("memory", await server.stream(prompt, 8)))
    server.stop()
    with restarted() as again:
        rows.append(row("disk", await again.stream(prompt, 8)))
    texts = {each.pop("text") for each in rows}
    return [each | {"equal": len(texts) == 1} for each in rows]


async def memory(server: Server, lengths: list[int]) -> list[dict]:
    """Returns a row for each length. A prompt of the same length is answered first, so that the allocator has grown.

    On a GPU also with the bytes that all processes hold there afterwards: what was needed at most, as PyTorch keeps it.
    """
    rows = []
    for length in lengths:
        await server.stream(prompt_of(length, 1), 2)
        before = server.memory()
        server.forget_peak()
        answer = await server.stream(prompt_of(length, 2), 2)
        peak = server.memory("VmHWM") - before
        row = {"measure": "memory", "prompt_tokens": length, "peak_extra_bytes": peak, "seconds": answer.seconds}
        rows.append(row | ({"gpu_bytes": gpu_bytes()} if server.device == "cuda" else {}))
    return [row | {"bytes_of_all_slots": int(await server.gauge("sympow_slots_bytes"))} for row in rows]


def gpu_bytes() -> int:
    """Returns the bytes of the GPU that are in use, by any process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


async def hostile(server: Server, count: int, new: int = 400) -> list[dict]:
    """Returns one row. The server draws `new` tokens for a valid request beside the hostile requests."""
    alone = await server.stream(prompt_of(SHORT, 1), new)
    for each in hostile_requests(50, NAME, seed=1):
        await server.send(each.method, each.path, each.body)
    before = server.memory()
    beside = asyncio.ensure_future(server.stream(prompt_of(SHORT, 1), new))
    statuses: dict[int, int] = {}
    for each in hostile_requests(count, NAME):
        status, _ = await server.send(each.method, each.path, each.body)
        statuses[status] = statuses.get(status, 0) + 1
    garbage: dict[int, int] = {}
    for i in range(80):
        status, _ = await server.send_bytes(NO_HTTP[i % len(NO_HTTP)])
        garbage[status] = garbage.get(status, 0) + 1
    after = await server.stream(prompt_of(SHORT, 1), new)
    undisturbed = (await beside).text == alone.text == after.text
    return [
        {
            "measure": "hostile",
            "requests": count,
            "statuses": {str(status): number for status, number in sorted(statuses.items())},
            "statuses_of_no_http": {str(status): number for status, number in sorted(garbage.items())},
            "all_4xx": all(400 <= status < 500 for status in statuses),
            "other_answers_equal": undisturbed,
            "more_bytes": server.memory() - before,
            "alive": server.process.poll() is None and await server.idle(),
        }
    ]


async def vanishing(server: Server, seconds: float, clients: int) -> list[dict]:
    """Returns one row. The server is stopped at the end while it still answers requests."""
    prompts, new = [prompt_of(40 + 30 * i, i) for i in range(8)], 60
    whole = [(await server.stream(prompt, new)).text for prompt in prompts]
    kept = left = wrong = 0
    ends, samples = time.monotonic() + seconds, []

    async def client(seed: int) -> None:
        nonlocal kept, left, wrong
        rng = random.Random(seed)
        while time.monotonic() < ends:
            i = rng.randrange(len(prompts))
            if rng.random() < 0.5:
                await server.stream(prompts[i], 4000, leave_after=rng.randrange(30))
                left += 1
            else:
                answer = await server.stream(prompts[i], new)
                kept += 1
                wrong += answer.usage is None or answer.text != whole[i]

    async def watch() -> None:
        while time.monotonic() < ends:
            samples.append(server.memory())
            await asyncio.sleep(seconds / 40)

    await asyncio.gather(watch(), *(client(seed) for seed in range(clients)))
    idle = await server.idle()
    last = [asyncio.ensure_future(server.stream(prompt, new)) for prompt in prompts]
    while not await server.gauge("sympow_decoding"):
        await asyncio.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    texts = [each.text for each in await asyncio.gather(*last)]
    tenth = len(samples) // 10 or 1
    return [
        {
            "measure": "vanishing",
            "seconds": seconds,
            "clients": clients,
            "answers": kept,
            "answers_wrong_or_lost": wrong,
            "clients_that_left": left,
            "bytes_after_a_tenth": samples[tenth],
            "bytes_at_the_end": samples[-1],
            "all_slots_free_afterwards": idle,
            "answers_whole_at_shutdown": sum(map(str.__eq__, texts, whole)),
            "answers_at_shutdown": len(texts),
            "exit_code": server.stop(),
            "faults": sum(line.startswith("Traceback") for line in server.told),
        }
    ]


async def measure(run: Path, chosen: Any, folder: Path) -> None:
    """Prints the rows, and writes them to a file."""
    most = max(chosen.streams)
    started = ("--slots", str(most), "--max-prompt-tokens", "2000000", "--max-new-tokens", "100000")
    uncached = (*started, "--cache-memory", "0")
    cached = (*started, "--cache-memory", "1", "--cache-dir", str(folder / "cache"))
    about = {"model": chosen.preset, "processor": processor(chosen.device), "torch": torch.__version__}
    rows: list[dict] = []

    def told(new: list[dict]) -> None:
        rows.extend(row | about | {"commit": commit()} for row in new)
        write(chosen.json, rows)
        for row in new:
            print(json.dumps(row), flush=True)

    with Server(run, chosen.device, *uncached) as server:
        told(await throughput(server, run, chosen.device, chosen.streams, chosen.new_tokens))
        told(await first_token(server, chosen.long))
        told(await memory(server, chosen.lengths))
        told(await hostile(server, chosen.hostile))
    with Server(run, chosen.device, *cached) as server:
        told(await prefix(server, lambda: Server(run, chosen.device, *cached), chosen.prefix))
    with Server(run, chosen.device, *started) as server:
        told(await vanishing(server, chosen.load_seconds, 2 * most))


def main() -> None:
    """Reads the options and measures."""
    parser = options("benchmarks.serving", __doc__ or "")
    parser.add_argument("--preset", default="tiny", help="shape of the model (default: tiny)")
    parser.add_argument("--vocab-size", type=int, default=256, help="of the model, at least 256 (default: 256)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="at a time (default: 1 4 16)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer (default: 128)")
    parser.add_argument("--long", type=int, default=100_000, help="prompt to be behind (default: 100,000)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 10_000, 100_000], help="prompts for memory")
    parser.add_argument("--prefix", type=int, default=10_000, help="prompt that is cached (default: 10,000)")
    parser.add_argument("--hostile", type=int, default=1000, help="requests that must be refused (default: 1,000)")
    parser.add_argument("--load-seconds", type=float, default=60, help="clients that vanish (default: 60)")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        untrained_run(run, preset(chosen.preset, chosen.vocab_size))
        asyncio.run(measure(run, chosen, Path(name)))


if __name__ == "__main__":
    main()
