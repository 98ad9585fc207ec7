"""The server under load: `python -m benchmarks.serving --device cpu --csv FILE`.

A server is started as a separate process, with an untrained model of bytes, which takes as much time as a trained
model. Clients send requests over HTTP and measure the times. In the measurement of throughput, the first 16 answers are
compared with answers to the same prompts without other requests. The file is written again after every measurement.

- throughput: tokens per second for each number of streams, and of `generate` with the same batch in this process; and
  the work of the engine in the fastest round, as in /metrics. A round of short answers comes first and is not timed.
- first token: the time to the first token, on an idle server and while a prompt of 100,000 tokens is read.
- prefix: the time to the first token of a new prompt, of the same prompt again, and after a restart, from the disk.
- memory: the peak memory of the process while it answers a prompt of a given length, minus the memory before.
- hostile: requests that must be refused, at the same time as a stream that must not change.
- vanishing: clients that close their connections at random moments, and others whose answers must be complete. Then the
server must shut down without an error.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.hostile_requests import NO_HTTP, hostile_requests
from benchmarks.common.measure import measured, options, write
from benchmarks.common.server_process import NAME, Server, Streamed
from sympow.data import ByteTokenizer, DataConfig
from sympow.models import LanguageModel, ModelConfig, generate, preset
from sympow.training import RunConfig, TrainingConfig, load
from sympow.training.run_folder import write_run_folder

SHORT = 128  # tokens of a short prompt
COMPARED = 16  # answers
UNTIMED = 32  # tokens of an answer in the round before those that are timed
MEASURES = ("throughput", "first-token", "memory", "hostile", "prefix", "vanishing")


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
    run = RunConfig(NAME, config, data, TrainingConfig(context=64, batch_size=1, steps=1, warmup_steps=1))
    write_run_folder(folder, run, model, step=1, tokenizer=None)
    ByteTokenizer().save(folder)


def prompt_of(length: int, seed: int) -> str:
    """Returns random letters. Each letter is a token."""
    rng = random.Random(seed)
    return "".join(chr(rng.randrange(97, 123)) for _ in range(length))


async def throughput(
    server: Server, run: Path, device: str, streams: list[int], new: int, rounds: int
) -> AsyncIterator[dict]:
    """Yields a row for each number of streams. Each rate is the best of the rounds.

    The server's seconds are those from the first request to the last answer, prompts included. Those of `generate` are
    given without its prompts, and with them as `whole`.
    """
    most = max(streams)
    prompts = [prompt_of(SHORT + i, i) for i in range(most)]
    alone = [(await server.stream(prompt, new)).text for prompt in prompts[: min(COMPARED, most)]]
    for count in streams:
        rates, generated, equal = [], [], True
        await asyncio.gather(*(server.stream(prompt, min(new, UNTIMED)) for prompt in prompts[:count]))
        for _ in range(rounds):  # in turns, so that a machine that slows down does so for both
            before, began = await server.work(), time.perf_counter()
            answers = await asyncio.gather(*(server.stream(prompt, new) for prompt in prompts[:count]))
            rate = count * new / (time.perf_counter() - began)
            rates.append((rate, (await server.work()).since(before)))
            equal &= [each.text for each in answers[:COMPARED]] == alone[:count]
            generated.append(_generated(run, device, count, new))
        fastest, work = max(rates, key=lambda each: each[0])
        row = {"measure": "throughput", "streams": count, "new_tokens": new, "tokens_per_second": fastest}
        row |= {"tokens_per_second_of_rounds": [rate for rate, _ in rates], "equal_to_alone": equal}
        row |= {"tokens_per_second_generate": max(decoding for decoding, _ in generated)}
        yield row | {"tokens_per_second_generate_whole": max(whole for _, whole in generated)} | work


def _generated(run: Path, device: str, batch: int, new: int) -> tuple[float, float]:
    model = _loaded(run, device)
    prompt = torch.tensor([list(prompt_of(SHORT, i).encode()) for i in range(batch)])
    made = generate(model, prompt, new, temperature=0)
    return made.tokens_per_second, batch * new / (made.prefill_seconds + made.decode_seconds)


@lru_cache(maxsize=1)
def _loaded(run: Path, device: str) -> LanguageModel:
    return load(run, device).model


async def first_token(server: Server, long: int, repeats: int = 9) -> list[dict]:
    """Returns a row for an idle server and a row for a server that reads a long prompt."""
    seeds = itertools.count(10_000)
    await _reading(server, long // 2, next(seeds), wait=True)  # kernels for its chunks are compiled
    rows = []
    for behind in (0, long):
        times: list[float] = []
        other = await _reading(server, behind, next(seeds)) if behind else None
        while len(times) < repeats:
            if other is not None and other.done():
                other = await _reading(server, behind, next(seeds))
            first = (await server.stream(prompt_of(SHORT, next(seeds)), 2)).first or float("nan")
            if other is None or not other.done():  # else it was not behind the other to its end
                times.append(first)
            await asyncio.sleep(0.05)
        if other is not None:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await server.idle()
        middle = {"seconds_to_first_token": statistics.median(times), "most_seconds": max(times)}
        rows.append({"measure": "first token", "behind_tokens": behind, "repeats": repeats} | middle)
    return rows


async def _reading(server: Server, length: int, seed: int, wait: bool = False) -> asyncio.Future[Streamed]:
    """Sends a prompt; returns once it is being read, or is read (`wait`)."""
    answer = asyncio.ensure_future(server.stream(prompt_of(length, seed), 1))
    while not answer.done() and (wait or not await server.gauge("sympow_reading")):
        await asyncio.sleep(0.01)
    return answer


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


async def memory(server: Server, length: int) -> list[dict]:
    """Returns a row with the peak memory of the process while it answered a prompt, minus the memory before.

    On a CPU a prompt of the same length is answered first, so that the allocator has grown. On a GPU the row also has
    the bytes that the server's tensors held there at most since its start.
    """
    row: dict[str, Any] = {"measure": "memory", "prompt_tokens": length}
    if server.device == "cpu":
        await server.stream(prompt_of(length, 1), 2)
    before = server.memory()
    server.forget_peak()
    answer = await server.stream(prompt_of(length, 2), 2)
    row |= {"peak_extra_bytes": server.memory("VmHWM") - before, "seconds": answer.seconds}
    if server.device == "cuda":
        row["gpu_bytes"] = int(await server.gauge("sympow_gpu_bytes"))
    return [row | {"bytes_of_all_slots": int(await server.gauge("sympow_slots_bytes"))}]


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
    rows: list[dict] = []

    def told(new: list[dict]) -> None:
        rows.extend(row | {"model": chosen.preset} | measured(chosen.device) for row in new)
        write(chosen.csv, rows)
        for row in new:
            print(json.dumps(row), flush=True)

    chunk = ("--prefill-chunk", str(chosen.memory_chunk)) if chosen.memory_chunk else ()
    if "throughput" in chosen.measures or "first-token" in chosen.measures:
        with Server(run, chosen.device, *uncached) as server:
            if "throughput" in chosen.measures:
                streams, new = chosen.streams, chosen.new_tokens
                async for row in throughput(server, run, chosen.device, streams, new, chosen.rounds):
                    told([row])
            if "first-token" in chosen.measures:
                told(await first_token(server, chosen.long))
    if "prefix" in chosen.measures:
        with Server(run, chosen.device, *cached) as server:
            told(await prefix(server, lambda: Server(run, chosen.device, *cached), chosen.prefix))
    if "memory" in chosen.measures or "hostile" in chosen.measures:
        with Server(run, chosen.device, *uncached, *chunk) as server:
            for length in chosen.lengths if "memory" in chosen.measures else []:
                told(await memory(server, length))
            if "hostile" in chosen.measures:
                told(await hostile(server, chosen.hostile))
    if "vanishing" in chosen.measures:
        with Server(run, chosen.device, *started) as server:
            told(await vanishing(server, chosen.load_seconds, 2 * most))


def main() -> None:
    """Reads the options and measures."""
    parser = options("benchmarks.serving", __doc__ or "")
    parser.add_argument("--preset", default="tiny", help="shape of the model (default: tiny)")
    parser.add_argument("--vocab-size", type=int, default=256, help="of the model, at least 256 (default: 256)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="at a time (default: 1 4 16)")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput (default: 3)")
    parser.add_argument("--memory-chunk", type=int, help="--prefill-chunk of the server for memory (default: its own)")
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
