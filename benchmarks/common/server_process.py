"""`sympow serve` as a process, and a client of it that is told when every piece of an answer comes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from benchmarks.common.hostile_requests import COMPLETIONS

NAME = "served"


class Server:
    """Runs `sympow serve` as a process while it is entered, with as many threads as this process has."""

    def __init__(self, run: Path, device: str, *options: str):
        self.device = device
        words = [sys.executable, "-m", "sympow", "serve", str(run), "--port", "0", "--device", device, "--name", NAME]
        self._words = [*words, *options]
        self._environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.told: list[str] = []

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(self._words, env=self._environment, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://([\d.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True).start()
                return self
        raise RuntimeError(f"the server did not start: exit code {self.process.wait()}")

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _listen(self, stderr: TextIO) -> None:
        for line in stderr:
            self.told.append(line)
            if line != "stopped\n":
                print(line, end="", file=sys.stderr, flush=True)

    def stop(self) -> int:
        """Ends the process with SIGTERM and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def memory(self, field: str = "VmRSS") -> int:
        """Returns the bytes that the process holds (VmRSS), or held at its peak (VmHWM)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def forget_peak(self) -> None:
        """Resets VmHWM."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    async def gauge(self, name: str) -> float:
        """Returns a number of /metrics."""
        text = (await self.send("GET", "/metrics"))[1].decode()
        return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    async def work(self) -> EngineWork:
        """Returns what the engine has done since its start."""
        text = (await self.send("GET", "/metrics"))[1].decode()
        parts = re.findall(r'^sympow_engine_seconds_total{part="(\w+)"} (\S+)$', text, re.MULTILINE)
        names = ("steps", "stepped_rows", "prompt_calls")
        counts = [float(re.search(rf"^sympow_{name}_total (\S+)$", text, re.MULTILINE)[1]) for name in names]  # type: ignore[index]
        return EngineWork({part: float(spent) for part, spent in parts}, *map(int, counts))

    async def idle(self) -> bool:
        """Waits up to 30 seconds, and returns whether all requests have ended."""
        for _ in range(300):
            if sum([await self.gauge(f"sympow_{name}") for name in ("waiting", "reading", "decoding")]) == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    async def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Sends a request, and returns the status and the body of the answer."""
        return await self.send_bytes(_request(method, path, body))

    async def send_bytes(self, content: bytes) -> tuple[int, bytes]:
        """Sends any bytes, and returns the status and the body of the answer; status 0 if there was no answer."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(content)
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        except ConnectionError:
            return 0, b""
        finally:
            writer.close()
        return int(head.split(b" ")[1]) if head.startswith(b"HTTP/1.1 ") else 0, answer

    async def stream(self, prompt: str, new: int, *, leave_after: int | None = None) -> Streamed:
        """Streams a greedy completion. The client closes the connection after `leave_after` events."""
        asked = {"model": NAME, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
        body = json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        began, first, text, usage, events = time.perf_counter(), None, [], None, 0
        try:
            writer.write(_request("POST", COMPLETIONS, body))
            while leave_after is None or events < leave_after:
                line = await reader.readline()
                if not line or line.startswith(b"data: [DONE]"):
                    break
                if not line.startswith(b"data: "):
                    continue
                events += 1
                content = json.loads(line[6:])
                usage = content.get("usage") or usage
                if "error" in content:
                    break
                for choice in content["choices"]:
                    first = time.perf_counter() - began if first is None else first
                    text.append(choice["text"])
        finally:
            writer.close()
        return Streamed("".join(text), usage, first, time.perf_counter() - began)


class EngineWork(NamedTuple):
    """Holds what an engine has done: the seconds of each part, steps, rows of all steps, calls that read prompts."""

    seconds: dict[str, float]
    steps: int
    rows: int
    prompt_calls: int

    def since(self, before: EngineWork) -> dict[str, Any]:
        """Returns what was done since an earlier time, as fields of a row."""
        steps = self.steps - before.steps
        return {
            "engine_seconds": {part: round(spent - before.seconds[part], 4) for part, spent in self.seconds.items()},
            "steps": steps,
            "rows_a_step": round((self.rows - before.rows) / max(1, steps), 2),
            "prompt_calls": self.prompt_calls - before.prompt_calls,
        }


class Streamed(NamedTuple):
    """Holds an answer: its text, its usage (None if it is not whole), the seconds to the first event and to the end."""

    text: str
    usage: dict[str, Any] | None
    first: float | None
    seconds: float


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
