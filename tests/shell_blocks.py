"""The commands in the shell blocks of pages: what makes each of them small, and which cannot run in a test.

A command is found in the tables by its first words; of several entries the longest counts.
"""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from sympow.cli import main, parse

_STEPS = "training.steps=2 training.warmup_steps=1 training.context=32 training.evaluation_batches=1"
_RECALL = (
    "width=32 batch_size=8 examples=32 validation_examples=6 test_examples=6 epochs=1 validations=1 learning_rate=1e-3 "
    "seed=0 precision=float32"
)
_ONE_TASK = "train.0.length=32 train.0.pairs=2"  # which makes runs of a sweep that differ in this alone one run

# Words behind those of the page: of an option the last counts, and fields of a config take the place of the page's.
SMALLER = {
    "sympow train demo:": f"{_STEPS} data.kind=text data.path=TEXTS data.tokenizer=bytes data.vocab_size=256 "
    "model.vocab_size=256",
    "sympow train demo:power data.kind=text data.path=rows": f"{_STEPS} data.tokenizer=bytes data.vocab_size=256 "
    "model.vocab_size=256",
    "sympow train demo:power data.kind=text data.paths=": f"{_STEPS} data.tokenizer=bytes data.vocab_size=256 "
    "model.vocab_size=256",
    "sympow train demo:power data.kind=tokens": _STEPS,
    "sympow train --from": f"{_STEPS} data.path=TEXTS",
    "sympow train my_recipe.py:run": "",
    "sympow train longcrawl64:": f"{_STEPS} training.batch_size=2 training.precision=float32 model.d_model=24 "
    "model.n_layers=1 model.n_heads=2 model.vocab_size=300 data.vocab_size=300",
    "sympow train scaling:": f"{_STEPS} training.batch_size=2 training.precision=float32 model.d_model=24 "
    "model.n_heads=2 model.vocab_size=300 data.vocab_size=300",
    "sympow evaluate": "--context 64 --rows 2",
    "sympow generate": "--max-new-tokens 8",
    "sympow read": "",
    "sympow distill": f"{_STEPS} training.batch_size=2 training.precision=float32 distillation.layer_steps=1 "
    "distillation.text_steps=1 execution.compile=false",
    "sympow sizes": "",
    "sympow mqar": f"{_RECALL} --executor process --jobs 1 --device cpu",
    "sympow mqar mqar:widths": f"{_RECALL} {_ONE_TASK} --executor process --jobs 1 --device cpu",
    "sympow mqar-figures": "",
    "sympow ar-hits": "--rows 2",
    "sympow recall-probe": "--pairs 4 --queries 8",
    "sympow passkey": "--context 128 --texts 1",
    "sympow needles": "--context 512 --texts 1 --task single --values words",
    "sympow corpus": "--vocab-size 300 --row-tokens 64",
    "sympow kernel-corpus": "--source linux --vocab-size 300",
    "sympow doc-corpus": "--source debs --vocab-size 300",
    "sympow doc-corpus --tokenizer": "--source debs",
    "sympow needle-corpus": "--rows 2 --row-tokens 512",
    "python -m benchmarks.context_files": "--read 32 --predicted 4 --rows 1",
    "python -m benchmarks.subset": "--rows 2",
    "python -m benchmarks.conversion measure": "--context 32 --rows 2 --positions 48 --position-rows 2",
    "python -m benchmarks.conversion_decoding": "--shape tiny --contexts 1100 --batch 1 --tokens 1 --threads 1",
    "python -m benchmarks.mqar": f"{_RECALL} --jobs 1",
    "python -m benchmarks.mqar mqar:hybrids": f"{_RECALL} {_ONE_TASK} --jobs 1",
    "python -m benchmarks.mqar mqar:pairs": f"{_RECALL} --only architecture.label=RetNet --jobs 1",
    "python -m benchmarks.powers": "--shapes 2,4,4,1 --times 32 --chunks 8 --threads 1",
    "python -m benchmarks.training": "--device cpu --preset nano --vocabulary 29 --contexts 32 --tokens 32 --steps 1 "
    "--modes eager",
    "python -m benchmarks.training_ranks": "--device cpu --preset nano --context 16 --rows 2 --steps 2 --warmup 1",
}

# Why a command does not run here. A test that is named runs it small.
NOT_RUN = {
    "pip": "installs packages; tests/test_release.py installs the wheel into an empty environment",
    "python3.11 -m venv": "installs packages",
    "python -m venv": "installs packages",
    "oldest/bin/": "is of an environment with packages that are not here",
    "vllm-env/bin/": "is of an environment with packages that are not here",
    "git clone": "needs a network",
    "cd": "is of a clone, which this is",
    "unzip": "is of a model that is fetched",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer": "needs a GPU and CUDA's tools",
    "apt-get": "needs a network",
    "make": "makes an environment of its own; CI begins with it",
    "sympow demo": "takes minutes: tests/cli/test_main.py",
    "sympow serve": "runs until a signal: tests/serving/test_http_server.py",
    "curl": "asks a server: tests/serving/test_http_server.py",
    "sympow train longcrawl64:power data.path=URL": "needs a network: tests/data/test_zarr_corpus.py",
    "sympow mqar mqar:widths --jobs 64 --executor slurm": "needs a cluster: tests/recall/test_sweep.py",
    "sympow generate brumby": "needs weights of 30 GB: tests/integrations/test_transformers_power_models.py",
    "sympow convert": "needs transformers: tests/integrations/test_transformers_conversion.py",
    "sympow distill swapped --teacher SmolLM2": "needs transformers: "
    "tests/integrations/test_transformers_conversion.py",
    "sympow export": "needs transformers: tests/integrations/test_transformers_folders.py",
    "torchrun": "starts several processes: tests/training/test_ranks.py",
    "vllm serve": "needs vLLM: tests/integrations/test_vllm.py",
    "python -m vllm": "needs vLLM: tests/integrations/test_vllm.py",
    "python -c": "needs lm-eval: tests/integrations/test_transformers_harness.py",
    "python -m benchmarks.harness": "needs lm-eval: tests/integrations/test_transformers_harness.py",
    "python -m benchmarks.hf_generate": "needs transformers and a GPU",
    "python -m benchmarks.zoology_trainer": "needs Zoology: tests/integrations/test_zoology.py",
    "python -m benchmarks.ar_hits": "trains in processes of its own and reports on all of them: "
    "tests/benchmarks/test_ar_hits.py",
    "python -m benchmarks.learning": "trains in processes of its own: tests/benchmarks/test_learning.py",
    "python -m benchmarks.context_scaling": "reads committed results or times a GPU: "
    "tests/benchmarks/test_context_scaling.py",
    "python -m benchmarks.context_use": "measures a trained model: tests/benchmarks/test_context_use.py",
    "python -m benchmarks.tables": "writes the pages: tests/benchmarks/test_ops.py",
    "python -m benchmarks.mqar mqar:deep": "trains rows of 512 tokens: tests/benchmarks/test_mqar.py",
    "python -m benchmarks.mqar mqar:far": "trains on rows of 8,192 tokens: tests/cli/test_recipes.py",
    "python -m benchmarks.mqar mqar:equal_state": "trains models with large states: tests/benchmarks/test_mqar.py",
    "python -m benchmarks.chunks": "times kernels of a GPU: tests/benchmarks/test_chunks.py",
    "python -m benchmarks.long_text": "reads a million tokens: tests/benchmarks/test_long_text.py",
    "python -m benchmarks.positions": "trains on rows of 65,536 tokens: tests/benchmarks/test_positions.py",
    "python -m benchmarks.brumby": "times a model of 14 billion parameters: tests/benchmarks/test_brumby.py",
    "python -m benchmarks.decoding": "times models on a GPU: tests/benchmarks/test_decoding_gpu.py",
    "python -m tests.ops.triton.compile_record": "compiles for minutes: tests/ops/triton/test_compile.py",
    "PYTHONPATH=triton36": "compiles for minutes: tests/ops/triton/test_compile.py",
    "python -m benchmarks.serving": "starts servers and waits for them: tests/benchmarks/test_serving.py",
}


# Packages that a benchmark imports as it starts, and without which its options cannot be read.
OPTIONAL = ("transformers",)


class Command(NamedTuple):
    """A command of a page, without the comment behind it."""

    page: Path
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def entry(self) -> str:
        """Its entry in one of the tables, "" if it has none."""
        return max((key for key in (*SMALLER, *NOT_RUN) if self.text.startswith(key)), key=len, default="")

    @property
    def more(self) -> list[str]:
        """The words that make it small."""
        return shlex.split(SMALLER[self.entry])


def commands_of(page: Path) -> Iterator[Command]:
    """The commands in the blocks of a page that name no language, or a shell."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
        if language in ("", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                joined = groupby(shlex.split(line, comments=True), lambda word: word == "&&")
                yield from (Command(page, tuple(words)) for between, words in joined if not between)


def run(command: Command) -> int:
    """Runs a command in this process, small and on the CPU, in the current folder; returns its exit status."""
    fields = tuple(word.partition("=")[0] + "=" for word in command.more if "=" in word)
    return _start([*(word for word in _on_cpu(command.words) if not word.startswith(fields)), *command.more])


def check_options(command: Command) -> None:
    """Raises SystemExit for a command of sympow or of its benchmarks that has other options than it is given."""
    words = _on_cpu(command.words)
    if words[0] == "torchrun" and "-m" in words:
        words = ["python", *words[words.index("-m") :]]
    if words[:3] == ["python", "-m", "sympow.cli"]:
        words = ["sympow", *words[3:]]
    if words[0] == "sympow":
        parse(words[1:])
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("parse_args", "parse_intermixed_args"):
                patch.setattr(argparse.ArgumentParser, name, _stopping(getattr(argparse.ArgumentParser, name)))
            try:
                _start(words)
            except KeyboardInterrupt:
                return
            except ModuleNotFoundError as error:
                if error.name in OPTIONAL:
                    return
                raise
        raise AssertionError(f"{words[2]} reads no options")


def _stopping(parse_args: Callable) -> Callable:
    def stop(*given) -> NoReturn:
        parse_args(*given)
        raise KeyboardInterrupt

    return stop


def _on_cpu(words: tuple[str, ...]) -> list[str]:
    return ["cpu" if pair == ("--device", "cuda") else pair[1] for pair in pairwise(("", *words))]


def _start(words: list[str]) -> int:
    if words[0] == "sympow":
        return main(words[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[2:])
        patch.delitem(sys.modules, words[2], raising=False)  # another test may have imported it
        try:
            runpy.run_module(words[2], run_name="__main__")
        except SystemExit as end:
            if not isinstance(end.code, int):
                return 0 if end.code is None else 1
            return end.code
    return 0
