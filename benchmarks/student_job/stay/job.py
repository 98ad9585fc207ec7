"""Prepares data (prep), or trains and measures one student: job.py TREE DATA OUT SECONDS NAME.

d: windows and the delta rule in turns; h: the same with five gated softmax layers; n: as d with p = 1; w: windows;
p: the delta rule in all layers. Phases: A0 layers and a few steps on predictions, B predictions, both in rows of
8,192, C and further ones text in rows of 16,384.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

START = time.monotonic()
TREE, DATA, OUT = map(Path, sys.argv[1:4])
SECONDS = float(sys.argv[4])
NAME = sys.argv[5]
TOY = os.environ.get("TOY", "0") not in ("", "0")
WINDOW = os.environ.get("WINDOW", "64" if TOY else "512")
UNSHARE = os.environ.get("UNSHARE", "1") not in ("", "0")
SHARED = Path(os.environ["SHARED"])
WORK = SHARED if NAME in ("prep", "warm") else SHARED / NAME
LOG = (OUT / "job.log").open("a", buffering=1)

T_B, T_C = (128, 256) if TOY else (8192, 16384)
N_B, N_C = (512, 512) if TOY else (8192, 16384)  # tokens of needle rows
GUESS = 75_000.0  # tokens a second where nothing was measured


def now():
    return time.monotonic() - START


def left():
    return SECONDS - now()


def log(text):
    line = f"{now():7.1f}s {text}"
    print(line, flush=True)
    LOG.write(line + "\n")


def environment():
    own = dict(os.environ)
    own["PYTHONPATH"] = os.pathsep.join([str(TREE), *EXTRA, *INHERITED])
    return own


EXTRA: list[str] = []  # folders of unpacked wheels
INHERITED = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and Path(each) != TREE]


def have_packages():
    """Unpacks wheels where a package is missing."""
    site = SHARED / "site"
    need = {"zarr": "zarr", "numcodecs": "numcodecs", "donfig": "donfig", "google_crc32c": "google_crc32c",
            "yaml": "pyyaml", "gguf": "gguf"}
    for module, wheel in need.items():
        probe = subprocess.run([sys.executable, "-c", f"import {module}"], env=environment(), capture_output=True)
        if probe.returncode == 0:
            continue
        found = sorted([*(DATA / "whl").glob("*.whl"), *(TREE / ".whl").glob("*.whl")])
        found = [each for each in found if each.name.lower().startswith(f"{wheel}-")]
        if not found:
            log(f"MISSING package {module}, and no wheel")
            continue
        with zipfile.ZipFile(found[0]) as archive:
            archive.extractall(site)
        if str(site) not in EXTRA:
            EXTRA.append(str(site))
        again = subprocess.run([sys.executable, "-c", f"import {module}"], env=environment(), capture_output=True, text=True)
        log(f"package {module} from {found[0].name}: {'ok' if again.returncode == 0 else again.stderr[-300:]}")


class Task:
    """A command in the background, with its output in OUT/NAME.txt, which may be ended at a time."""

    def __init__(self, name, words, limit, nice=0, cwd=None, quiet=False):
        self.name, self.began, self.limit, self.quiet = name, now(), limit, quiet
        self.file = (OUT / f"{name}.txt").open("a", buffering=1)
        self.file.write(f"$ {' '.join(map(str, words))}\n")
        words = ["nice", "-n", str(nice), *map(str, words)] if nice else list(map(str, words))
        self.process = subprocess.Popen(words, stdout=self.file, stderr=self.file, env=environment(), cwd=cwd or TREE,
                                        start_new_session=True)  # fmt: skip
        self.asked = None

    def poll(self):
        """Returns the exit code, or None; interrupts what runs too long."""
        code = self.process.poll()
        if code is not None:
            return code
        if now() - self.began > self.limit and self.asked is None:
            self.asked = now()
            log(f"{self.name}: interrupted after {self.limit:.0f} s")
            self.process.send_signal(signal.SIGINT)
        elif self.asked is not None and now() - self.asked > 40:
            self._send(signal.SIGKILL)
        return None

    def _send(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def wait(self):
        while self.poll() is None:
            time.sleep(0.2)
        if not self.quiet:
            log(f"{self.name}: exit {self.process.returncode} after {now() - self.began:.1f} s")
        return self.process.returncode


def cli(*words):
    return [sys.executable, "-m", "sympow.cli", *words]


def wait_all(tasks):
    while any(task.poll() is None for task in tasks):
        time.sleep(0.2)
    for task in tasks:
        if task.process.returncode or not task.quiet:
            log(f"{task.name}: exit {task.process.returncode}")


# ------------------------------------------------------------------------------------------------- data

UNPACK = r"""
import json, sys
from pathlib import Path
import numpy as np
data, work, parts = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, sys.argv[4])
from sympow.data import load_tokenizer
tokenizer = load_tokenizer(data / "tokenizer.json")
docs = work / "docs"
docs.mkdir(parents=True, exist_ok=True)
for split in ("train", "heldout"):
    rows = np.fromfile(data / f"{split}.u16", "<u2").reshape(-1, 65536)
    array = docs / f"{split}.zarr.new"
    array.mkdir(exist_ok=True)
    meta = {"zarr_format": 2, "shape": list(rows.shape), "chunks": [1, 65536], "dtype": "<u2", "compressor": None,
            "fill_value": 0, "order": "C", "filters": None}
    (array / ".zarray").write_text(json.dumps(meta))
    for number, row in enumerate(rows):
        (array / f"{number}.0").write_bytes(row.tobytes())
    array.rename(docs / f"{split}.zarr")
    if split == "heldout":
        # the prose of the evaluation: rows from all over the held-out manuals
        chosen = rows[np.linspace(0, len(rows) - 1, min(12, len(rows))).astype(int)]
        (work / "heldout.txt").write_text("\n\n".join(tokenizer.decode(r[:16384].tolist()) for r in chosen))
    else:
        # the prose of the needle rows: each part has other documents
        most = int(sys.argv[5])
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)
        for part in range(parts):
            own = chosen[part::parts]
            folder = work / "texts" / f"{part:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            for n in own:
                (folder / f"{n:04d}.txt").write_text(tokenizer.decode(rows[n].tolist()))
(work / "docs" / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
print("unpacked")
"""


# name: (tokens of a row, rows of all parts together, every, seed)
KINDS = {
    "b": (N_B, 1800, 200, 200),
    "c": (N_C, 1000, 200, 300),
    "s": (N_C, 1000, 600, 400),  # sparse: one of 27 facts of a row is a passkey
}
PARTS = 2 if TOY else 6


def make_needles(kinds):
    tasks = []
    for kind in kinds:
        tokens, rows, every, seed = KINDS[kind]
        if TOY:
            rows, every = 2 * PARTS, 128
        for part in range(PARTS):
            words = cli("needle-corpus", SHARED / "texts" / f"{part:02d}", "--tokenizer", SHARED / "docs", "--out",
                        SHARED / f"needles-{kind}{part}", "--rows", -(-rows // PARTS), "--row-tokens", tokens,
                        "--every", every, "--seed", seed + part, "--quiet")  # fmt: skip
            tasks.append(Task(f"needles-{kind}{part}", words, 600, nice=10, quiet=True))
    return tasks


def needles(kind):
    """Returns the finished corpora of a kind."""
    return [str(path) for path in sorted(SHARED.glob(f"needles-{kind}?/train.zarr"))]


def mixture(share, *kinds):
    """Returns paths and weights: the documents have weight 1, all needles together `share`."""
    paths = [path for kind in kinds for path in needles(kind)]
    documents = str(SHARED / "docs" / "train.zarr")
    if not paths:
        if kinds:
            log("no needles: documents only")
        return [f"data.paths={documents}", "data.weights=1"]
    weights = ["1", *[f"{share / len(paths):.6f}"] * len(paths)]
    return [f"data.paths={','.join([documents, *paths])}", f"data.weights={','.join(weights)}"]


# ------------------------------------------------------------------------------------------------- phases


def metrics(folder):
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []


def speed(rows, stage=None):
    """Returns the usual tokens a second of the last half of the rows."""
    rates = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")
             and (stage is None or row.get("stage") == stage)]  # fmt: skip
    return statistics.median(rates[len(rates) // 2 :]) if rates else None


RATES = {}  # by phase
OVERHEADS = {"A0": 90.0}  # seconds of a phase beside its steps at the usual speed
LAST = {"model": None}

KNOWN = {"divide": 1, "compile": True}  # what has worked


def distill(model, folder, data, steps, context, batch, rows, rate, dropout, layers, text, warmup, compiled, more=()):
    """Returns the words of a command that trains."""
    given = " ".join(map(str, more))
    often = [] if "evaluate_every" in given else [f"training.evaluate_every={max(1, -(-steps // 3))}",
                                                  f"training.checkpoint_every={steps}"]  # fmt: skip
    return cli(
        "distill", "--traceback", model, "--teacher", SHARED / "teacher", "--out", folder,
        *data, f"execution.compile={'true' if compiled else 'false'}",
        f"training.steps={steps}", f"training.learning_rate={rate}",
        f"training.context={context}", f"training.batch_size={batch}", f"training.micro_batch_size={rows}",
        f"training.warmup_steps={min(warmup, steps // 3)}", *often,
        f"training.evaluation_batches={2 if TOY else 4}",
        f"training.log_every={1 if TOY else 5 if layers else 10}", "training.keep_checkpoints=1",
        f"distillation.layer_steps={layers}", f"distillation.text_steps={min(text, steps)}",
        f"distillation.window_dropout={dropout}", *([] if "optimizer" in given else ["training.optimizer=muon"]), *more,
    )  # fmt: skip


def phase(name, steps, context, batch, micro, rate, dropout, layers, text, data, limit, warmup, more=()):
    """Trains from the last good folder; returns whether there is a new one. Tries again with less."""
    ends, first_limit, unknown = now() + limit, limit, False
    for attempt in range(4):
        room = ends - now()
        if attempt and room < max(45.0, 0.3 * first_limit):
            log(f"{name}: no time to try again")
            return False
        if attempt:
            steps = max(layers + 10, layers + int((steps - layers) * 0.9 * room / limit))
            limit = room
        folder = WORK / f"run-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        rows = max(1, micro // KNOWN["divide"])
        compiled = KNOWN["compile"] and not TOY
        optimizer = "adamw" if TOY and name != "A0" else "muon"
        words = distill(LAST["model"], folder, data, steps, context, batch, rows, rate, dropout, layers, text,
                        warmup, compiled, [f"training.optimizer={optimizer}", *more])  # fmt: skip
        log(f"{name}: {steps} steps of {batch} x {context}, {rows} rows a pass, rate {rate}, compile {compiled}, "
            f"limit {room:.0f} s, from {LAST['model']}")  # fmt: skip
        if os.environ.get("BREAK") == name:  # to test what follows a failure
            words.append("data.held_out_path=/missing")
        output = OUT / f"run-{name}.txt"
        before = output.stat().st_size if output.exists() else 0
        task = Task(f"run-{name}", words, max(20.0, room))
        code = task.wait()
        wall = now() - task.began
        rows_of = metrics(folder)
        for file in ("metrics.jsonl", "config.json"):
            if (folder / file).is_file():
                shutil.copy(folder / file, OUT / f"{name}-{file}")
        saved = [each for each in (folder / "checkpoints").glob("step-*") if "00000000" not in each.name]
        if rows_of:
            RATES[name] = (speed(rows_of, 2) if name == "A0" else None) or speed(rows_of) or GUESS
            OVERHEADS[name] = max(10.0, wall - rows_of[-1]["tokens"] / RATES[name])
            last = next((row for row in reversed(rows_of) if "gap" in row), {})
            log(f"{name}: {rows_of[-1]['tokens']:,} tokens, {RATES[name]:,.0f} tokens/s, {OVERHEADS[name]:.0f} s beside; "
                f"loss {rows_of[-1]['loss']:.4f}, held out {last.get('held_out_loss')}, gap {last.get('gap')}")  # fmt: skip
        if saved and (code == 0 or task.asked is not None):
            LAST["model"] = folder
            return True
        RATES.pop(name, None)
        said = output.read_text(errors="replace").encode()[before:].decode(errors="replace")
        lines = [line for line in said.splitlines() if not line.startswith("$ ")]
        log(f"{name}: failed; last lines: " + " | ".join(lines[-4:])[-900:])
        if "out of memory" in said.lower() and rows > 1:
            KNOWN["divide"] *= 2
        elif "not finite" in said or "out of range" in said:
            rate /= 2
        elif KNOWN["compile"] and ("_dynamo" in said or "_inductor" in said):
            KNOWN["compile"] = False
        elif unknown:
            return False
        else:
            unknown = True
    return False


def steps_for(name, like, factor, batch, context, seconds, beside=1.0):
    """Returns the steps that take `seconds`, by the speed of the phase `like` times `factor`."""
    rate = RATES.get(like, GUESS) * factor
    usable = max(0.0, seconds - beside * OVERHEADS.get(like, 60.0))
    steps = int(0.96 * usable * rate / (batch * context))
    log(f"{name}: {seconds:.0f} s planned, {usable:.0f} s of steps at {rate:,.0f} tokens/s give {steps} steps")
    return 3 if TOY else steps


# ------------------------------------------------------------------------------------------------- measures


def bench(label, model, parts, limit, rows=64, positions=24):
    words = [sys.executable, "-m", "benchmarks.conversion", "measure", model, "--teacher", SHARED / "teacher",
             "--csv", OUT / f"{label}.csv", "--parts", *parts, "--rows", 2 if TOY else rows,
             "--position-rows", 1 if TOY else positions]  # fmt: skip
    if TOY:
        words += ["--context", "256", "--passkey", "128", "--positions", "256"]
    return Task(f"measure-{label}", words, limit)


def ask(label, command, model, contexts, texts, limit, *more):
    words = cli(command, model, "--context", *contexts, "--texts", texts, "--csv", OUT / f"{label}.csv", "--quiet", *more)
    return Task(f"measure-{label}", words, limit)



def measure(name, rest, groups):
    """Runs the groups of measures one after another, those of a group at once, while there is time."""
    model, text, single = WORK / f"run-{name}", ["--text", SHARED / "heldout.txt"], ["--task", "single"]
    four, eight, sixteen, most = "128 192 256 128".split() if TOY else "4096 8192 16384 32768".split()
    few, ten = (1, 1) if TOY else (5, 10)
    own = f"{NAME}-{name}"

    def one(which, limit):
        words = {
            "bench": lambda: bench(f"bench-{own}", model, ["stages", "loss", "positions"], limit),
            "loss": lambda: bench(f"loss-{own}", model, ["stages", "loss"], limit),
            "curve": lambda: bench(f"curve-{own}", model, ["stages", "loss"], limit, rows=16),
            "keys4": lambda: ask(f"passkeys-4096-{own}", "passkey", model, [four], ten, limit),
            "keys8": lambda: ask(f"passkeys-8192-{own}", "passkey", model, [eight], ten, limit),
            "keys16": lambda: ask(f"passkeys-16384-{own}", "passkey", model, [sixteen], ten, limit),
            "keys32": lambda: ask(f"passkeys-32768-{own}", "passkey", model, [most], ten, limit),
            "words8": lambda: ask(f"words-8192-{own}", "needles", model, [eight], ten, limit, *single, "--values", "words", *text),
            "digits8": lambda: ask(f"digits-8192-{own}", "needles", model, [eight], ten, limit, *single, "--values", "digits", *text),
            "single4": lambda: ask(f"single-4096-{own}", "needles", model, [four], ten, limit, *single, *text),
            "multi": lambda: ask(f"multikey-{own}", "needles", model, [four, eight], few, limit, "--task", "multikey", *text),
            "trace": lambda: ask(f"tracing-{own}", "needles", model, [four], few, limit, "--task", "tracing", *text),
            "words16": lambda: ask(f"single-16384-{own}", "needles", model, [sixteen], few, limit, *single, *text),
        }  # fmt: skip
        return words[which]()

    for group in groups:
        limit = 900 if TOY else left() - rest
        if limit < 15:
            log(f"no time to measure {group}")
            return
        wait_all([one(which, limit) for which in group])


# ------------------------------------------------------------------------------------------------- the job


def wait_for(file):
    while not file.exists():
        time.sleep(0.5)
        if left() < 0:
            sys.exit(f"{file} did not come")


def prepare():
    gguf = next(DATA.glob("*.gguf"))
    begin = [
        Task("convert-teacher", cli("convert", gguf, "--out", WORK / "teacher", "--pattern", "softmax"), 300),
        Task("unpack", [sys.executable, "-c", UNPACK, DATA, WORK, PARTS, TREE, 4 if TOY else 360], 300),
        *[Task(f"convert-{name}", cli("convert", gguf, "--out", WORK / name / "swapped", "--pattern", PATTERNS[name],
               *(["--window", WINDOW] if "window" in PATTERNS[name] else []), *(["--p", "1"] if name == "n" else []),
               *(["--unshare"] if "delta" in PATTERNS[name] else [])), 300) for name in STUDENTS],
    ]  # fmt: skip
    wait_all(begin)
    (WORK / "ready").touch()
    wait_all(make_needles("b"))
    (WORK / "ready-b").touch()
    wait_all(make_needles("cs"))
    (WORK / "ready-cs").touch()
    log("prepared")


def warm():
    """Compiles what the students need, with small models of their layers: each kind of step in a process of its own."""
    own = [sys.executable, Path(__file__).with_name("fake.py"), WORK, Path(__file__).with_name("fake"), *(["64"] if TOY else [])]
    wait_all([Task("fake", own, 200)])
    data = ["data.kind=zarr", "data.pack=false", f"data.tokenizer={WORK / 'docs'}", f"data.paths={WORK / 'docs' / 'train.zarr'}",
            "data.weights=1", f"data.held_out_path={WORK / 'docs' / 'heldout.zarr'}"]  # fmt: skip
    often = ["training.evaluate_every=4", "training.checkpoint_every=100"]
    small, long = ((2, 2), (2, 2)) if TOY else ((4, 4), (4, 2))
    steps = 8
    kinds = {"layers": (4, T_B, *small, 0.25, 3, 0), "predictions": (steps, T_B, *small, 0.5, 0, 0), "text": (steps, T_C, *long, 0.5, 0, 10**6)}
    tasks = [
        Task(f"warm-{kind}", distill(WORK / "student", WORK / f"run-{kind}", data, steps, context, batch, micro, 1e-4, dropout, layers, text,
                                     1, not TOY, often), 400)
        for kind, (steps, context, batch, micro, dropout, layers, text) in kinds.items()
    ]  # fmt: skip
    wait_all(tasks)
    log("warm")


D, G = "window,delta", "window,gated"
PATTERNS = {"d": D, "h": ",".join([G, G, D, D, D, D, G, D, G, G, D, D, D, D, D]), "p": "delta",
            "n": D, "w": "window"}
STUDENTS = os.environ.get("STUDENTS", "d h").split()
STEPS = {  # of B, C and what follows; 0: as many as the time lets
    "d": (480, 0),
    "n": (480, 0),
    "h": (650, 200),
    "w": (240, 120),
    "p": (200, 100, 100, 150, 0),
}.get(NAME, ())
STEPS = tuple(3 if TOY else n for n in STEPS)
REST = float(os.environ.get("REST", 0 if TOY else 240))  # seconds for the last measures


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it, and its children
    WORK.mkdir(parents=True, exist_ok=True)
    log(f"{NAME}: tree {TREE}, data {DATA}, budget {SECONDS:.0f} s, window {WINDOW}, toy {TOY}")
    have_packages()
    if shutil.which("git") is None:  # benchmarks.conversion asks it for the commit
        (WORK / "bin").mkdir(exist_ok=True)
        (WORK / "bin" / "git").write_text("#!/bin/sh\nexit 0\n")
        (WORK / "bin" / "git").chmod(0o755)
        os.environ["PATH"] = f"{WORK / 'bin'}{os.pathsep}{os.environ['PATH']}"
    if NAME == "prep":
        return prepare()
    if NAME == "warm":
        return warm()
    wait_for(SHARED / "ready")
    wait_for(Path("/tmp/students_go"))
    LAST["model"] = WORK / "swapped"
    common = ["data.kind=zarr", "data.pack=false", f"data.tokenizer={SHARED / 'docs'}",
              f"data.held_out_path={SHARED / 'docs' / 'heldout.zarr'}"]  # fmt: skip
    batch, micro = (2, 2) if TOY else (4, 4)
    layers = 1 if TOY else 60 if NAME == "p" else 150
    text = [*common, *mixture(0)]
    phase("A0", layers + (1 if TOY else 30), T_B, batch, micro, 1e-3, 0.25, layers, 0, text,
          1e5 if TOY else 600, 0 if TOY else 20)  # fmt: skip
    wait_for(SHARED / "ready-b")
    phase("B", STEPS[0], T_B, batch, micro, 1e-3, 0.4, 0, 0, [*common, *mixture(0.6, "b")], 1e5 if TOY else left() - REST,
          1 if TOY else 40, ["training.seed=1"])  # fmt: skip
    watch = []

    def look(name):
        if NAME == "p":
            watch.append(threading.Thread(target=measure, args=(name, 5, [["curve", "keys4"]])))
            watch[-1].start()

    look("B")
    wait_for(SHARED / "ready-cs")
    micro = 2
    for number, (name, steps) in enumerate(zip("CEFG", STEPS[1:])):
        planned = left() - REST
        if number and planned < (0 if TOY else 80):
            break
        if steps == 0:
            steps = max(steps_for(name, "BCEF"[number], 1.0 if number else 1.2, batch, T_C, planned), 20)
        if phase(name, steps, T_C, batch, micro, 8e-4, 0.75, 0, 10**6, [*common, *mixture(2.0, "c", "s")],
                 1e5 if TOY else planned, 1 if TOY else 25, [f"training.seed={2 + number}"]):  # fmt: skip
            look(name)
    (SHARED / f"trained-{NAME}").touch()
    for each in watch:
        each.join()
    first = {"d": [["bench", "keys4", "keys16", "words8"], ["keys32", "digits8", "single4"], ["keys8", "multi", "trace"]],
             "h": [["bench", "keys32", "keys4"], ["keys16", "keys8", "words8"], ["digits8", "single4"], ["multi", "trace", "words16"]],
             "n": [["bench", "keys4", "keys16", "words8"], ["keys32", "digits8"]],
             "w": [["bench", "keys4", "keys16", "words8"], ["keys32", "digits8"]],
             "p": []}[NAME]  # fmt: skip
    last = Path(LAST["model"]).name.removeprefix("run-")
    if NAME != "p":
        loss = threading.Thread(target=measure, args=("B", 8, [["loss"]]))
        loss.start()
    measure(last, 8, first)
    if NAME != "p":
        loss.join()
    log("done")


if __name__ == "__main__":
    main()
