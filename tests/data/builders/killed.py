"""Builds of a corpus that are killed before they write, rename or remove their n-th file."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = """
import os, sys
from sympow import data

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

def build(out, source, events):
    left = events
    def count(event, arguments):
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in EVENTS:
            left -= 1
            if left < 0:
                os._exit(9)
    sys.addaudithook(count)
    build_corpus(out, source, vocab_size=300, row_tokens=64)
    os._exit(0)

name, out, source, *numbers = sys.argv[1:]
build_corpus = getattr(data, name)
for events in map(int, numbers):
    child = os.fork()
    if not child:
        build(out, source, events)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists(out), flush=True)
"""


def killed_builds(name: str, out: Path, source: Path, events: Sequence[int]) -> list[tuple[int, bool]]:
    """Of one build after the other by sympow.data's function `name`: its exit code, and whether `out` is there then.

    A build is killed, with code 9, before it writes, renames or removes a file more than `events` says.
    """
    words = [sys.executable, "-c", SCRIPT, name, str(out), str(source), *map(str, events)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    pairs = (line.split() for line in done.stdout.splitlines())
    return [(int(code), there == "True") for code, there in pairs]
