"""The command line: this file parses options. `commands` does the work and is imported only then."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from sympow import __version__
from sympow.cli import descriptions as about


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, 2 after an error, which is printed in one line, or 130 after Ctrl-C.

    If a signal stopped a run after a checkpoint was saved, the exit code is 128 + the signal's number, as in a shell.
    """
    try:
        options = parse(arguments)
        from sympow.cli import commands
        from sympow.layers import trust_code

        with trust_code(getattr(options, "trust_code", False)):
            code = getattr(commands, options.command.replace("-", "_"))(options)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError, OverflowError) as error:
        if options.traceback:
            raise
        _tell(_one_line(error))
        return 2


def parser() -> argparse.ArgumentParser:
    """Returns the commands and their options."""
    common = _Parser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    top = _Parser(prog="sympow", description="Power attention: train, evaluate and sample language models.")
    version = f"%(prog)s {__version__}"
    top.add_argument("--version", action="version", version=version, help="Print the version and exit.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=description, parents=[common])

    train = command("train", "Train the model of a recipe, or continue its run.", about.TRAIN)
    train.set_defaults(recipes=("RunConfig",))
    train.add_argument("--list", nargs=0, action=_ListRecipes, help="List the recipes and exit.")
    train.add_argument("recipe", metavar="RECIPE", nargs="?",
                       help="Run this recipe: demo:softmax, path/to/file.py:function or module:function. "
                            "It is optional with --from.")  # fmt: skip
    train.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="Set a field of the recipe's config, such as training.learning_rate=1e-3.",
    )
    train.add_argument(
        "--from",
        metavar="RUN",
        type=_path,
        dest="start",
        help="Begin with the weights of this run or checkpoint, and without a recipe with its config.",
    )
    train.add_argument("--out", metavar="DIR", type=_path,
                       help="Write the run into this folder (default: runs/NAME, with the run's name).")  # fmt: skip
    train.add_argument("--restart", action="store_true", help="First remove the files of an earlier run in the folder.")
    train.add_argument("--quiet", action="store_true", help="Print the last line only, without progress.")

    evaluate = command("evaluate", "Measure the held-out loss at every position of the context.", about.EVALUATE)
    evaluate.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.RUN)
    evaluate.add_argument(
        "--context",
        metavar="N",
        type=_positive,
        help="Predict N tokens in each sequence (default: 4 times the longest context trained on).",
    )
    evaluate.add_argument("--rows", metavar="N", type=_positive, default=16,
                          help="Average over N sequences (default: 16).")  # fmt: skip
    evaluate.add_argument(
        "--data",
        metavar="key=value",
        action="append",
        default=[],
        help="Change a field of the run's data config, such as kind=text; may be repeated.",
    )
    evaluate.add_argument("--dtype", choices=about.DTYPES, default="auto", help=about.WEIGHTS)
    evaluate.add_argument("--device", default="auto", help=about.DEVICE)
    evaluate.add_argument("--csv", metavar="FILE", type=_path, help="Write the losses into this file.")
    evaluate.add_argument("--plot", metavar="FILE", type=_path, help="Draw the curves of all runs into this image.")

    hits = command("ar-hits", "Measure the loss of tokens that can be recalled from the context.", about.AR_HITS)
    hits.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.SCORED)
    hits.add_argument(
        "--data",
        metavar="key=value",
        action="append",
        default=[],
        help="Change a field of the first run's data config, such as kind=text; may be repeated.",
    )
    hits.add_argument(
        "--context",
        metavar="N",
        type=_positive,
        help="Predict N tokens in each sequence (default: the shortest context that a model was trained on).",
    )
    hits.add_argument("--rows", metavar="N", type=_positive, default=64,
                      help="Average over N sequences (default: 64).")  # fmt: skip
    hits.add_argument("--frequent", metavar="N", type=int, default=1250,
                      help="Exclude bigrams from AR hits above N occurrences in training (default: 1250).")  # fmt: skip
    hits.add_argument("--count-tokens", metavar="N", type=_positive,
                      help="Count bigrams in about N tokens of the training data (default: all tokens).")  # fmt: skip
    hits.add_argument("--csv", metavar="FILE", type=_path, help="Write losses and gaps into this file.")
    hits.add_argument("--plot", metavar="FILE", type=_path, help="Draw losses by count and distance into this image.")
    hits.add_argument("--html", metavar="FILE", type=_path, help="Write sequences of coloured text as a page.")
    hits.add_argument("--examples", metavar="N", type=_positive, default=4,
                      help="Show N sequences on the page (default: 4).")  # fmt: skip
    hits.add_argument("--show", metavar="N", type=_positive, help="Print the last N tokens of a sequence in colour.")
    hits.add_argument("--device", default="auto", help=about.DEVICE)
    hits.add_argument("--quiet", action="store_true", help="Print the results only, without progress.")

    probe = command("recall-probe", "Ask a trained model for the values of keys in its context.", about.RECALL_PROBE)
    probe.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.SCORED)
    probe.add_argument("--pairs", metavar="P", type=_positive, nargs="+",
                       help="Use P pairs in each sequence "
                            "(default: those of 16 32 64 128 256 that fit the vocabulary).")  # fmt: skip
    probe.add_argument("--length", metavar="N", type=_positive,
                       help="Use sequences of N tokens (default: 8 for each pair).")  # fmt: skip
    probe.add_argument("--filler", choices=("random", "zero"), default="random",
                       help="Fill sequences with random tokens, or with one token (default: random).")  # fmt: skip
    probe.add_argument("--queries", metavar="N", type=_positive, default=2048,
                       help="Ask for N values for every P (default: 2048).")  # fmt: skip
    probe.add_argument("--seed", metavar="N", type=_natural, default=0,
                       help="Draw the sequences from this seed (default: 0).")  # fmt: skip
    probe.add_argument("--device", default="auto", help=about.DEVICE)

    passkey = command("passkey", "Measure the recall of a number in a long text.", about.PASSKEY)
    passkey.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.SCORED)
    passkey.add_argument("--context", metavar="N", type=_positive, nargs="+", default=[1024, 2048, 4096],
                         help="Make texts of N tokens (default: 1024 2048 4096).")  # fmt: skip
    passkey.add_argument("--texts", metavar="N", type=_positive, default=20,
                         help="Use N texts at each length and depth (default: 20).")  # fmt: skip
    passkey.add_argument("--seed", metavar="N", type=_natural, default=0,
                         help="Draw the numbers from this seed (default: 0).")  # fmt: skip
    passkey.add_argument("--device", default="auto", help=about.DEVICE)
    passkey.add_argument("--csv", metavar="FILE", type=_path, help="Write the results into this file.")
    passkey.add_argument("--plot", metavar="FILE", type=_path,
                         help="Draw accuracy by context and depth into this image.")  # fmt: skip
    passkey.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")

    generate = command("generate", "Continue a text.", about.GENERATE)
    generate.add_argument("run", metavar="RUN", type=_path, help=about.RUN)
    generate.add_argument("--context", metavar="FILE", type=_path,
                          help="Continue from this file, which `sympow read` wrote.")  # fmt: skip
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="Continue this text. It is optional with --context.")
    prompt.add_argument("--prompt-file", metavar="FILE", type=_path,
                        help="Read the prompt from this file; - means standard input.")  # fmt: skip
    generate.add_argument("--max-new-tokens", metavar="N", type=int, default=256,
                          help="Write at most N tokens (default: 256).")  # fmt: skip
    generate.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        default=1.0,
        help="Draw at this temperature; 0 always takes the likeliest token (default: 1).",
    )
    generate.add_argument("--top-k", metavar="K", type=int,
                          help="Draw from the K likeliest tokens (default: from all).")  # fmt: skip
    generate.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="Draw from the fewest tokens whose probabilities add up to P (default: from all).",
    )
    generate.add_argument("--seed", metavar="N", type=int, default=0,
                          help="Draw the tokens from this seed (default: 0).")  # fmt: skip
    drafts = generate.add_mutually_exclusive_group()
    drafts.add_argument("--speculate", action="store_true",
                        help="Propose tokens by prompt lookup: the text is the same, with fewer steps.")  # fmt: skip
    drafts.add_argument(
        "--draft",
        metavar="RUN",
        type=_path,
        help="Propose tokens with the smaller model of this run, which has the same tokenizer.",
    )
    generate.add_argument("--dtype", choices=about.DTYPES, default="auto", help=about.WEIGHTS)
    generate.add_argument("--device", default="auto", help=about.DEVICE)

    read = command("read", "Read a text and write the state after it into a context file.", about.READ)
    read.add_argument("run", metavar="RUN", type=_path, help=about.RUN)
    read.add_argument("text", metavar="TEXT", type=_path, help="Read this file; - means standard input.")
    read.add_argument("--out", metavar="FILE", type=_path, required=True, help="Write this context file.")
    read.add_argument("--context", metavar="FILE", type=_path, help="Continue from this context file.")
    read.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32",
                      help="Store states in this dtype; float32 is exact (default: float32).")  # fmt: skip
    read.add_argument("--chunk", metavar="N", type=_positive, default=1024,
                      help="Read N tokens in each step (default: 1024).")  # fmt: skip
    read.add_argument("--device", default="auto", help=about.DEVICE)
    read.add_argument("--quiet", action="store_true", help="Print the last line only, without progress.")

    serve = command("serve", "Serve a model over HTTP with OpenAI's interface.", about.SERVE)
    serve.add_argument("folder", metavar="DIR", type=_path, help="Serve this run, or this folder of `sympow export`.")
    serve.add_argument("--host", default="127.0.0.1", help="Listen at this address (default: 127.0.0.1).")
    serve.add_argument("--port", metavar="N", type=int, default=8000,
                       help="Listen at this port; 0 takes a free one (default: 8000).")  # fmt: skip
    serve.add_argument("--allowed-host", metavar="NAME", action="append", default=[],
                       help="Answer requests for this host too; * means all; may be repeated "
                            "(default: only localhost, where other machines cannot reach the server).")  # fmt: skip
    serve.add_argument("--name", help="Show this name of the model to clients (default: the folder's name).")
    serve.add_argument(
        "--api-keys",
        metavar="FILE",
        type=_path,
        help="Accept the keys in this file, one on each line (default: those in "
        "$SYMPOW_API_KEYS, separated by commas; without any, every client is accepted).",
    )
    for name, count, what in (("slots", 16, "Answer N requests at a time"),
                              ("max-prompt-tokens", 1_000_000, "Refuse prompts of more than N tokens"),
                              ("max-new-tokens", 4096, "Write at most N tokens of an answer")):  # fmt: skip
        serve.add_argument(f"--{name}", metavar="N", type=_positive, default=count,
                           help=f"{what} (default: {count:,}).")  # fmt: skip
    serve.add_argument("--prefill-chunk", metavar="N", type=_positive,
                       help="Read N tokens of a prompt at a time (default: 256; on a GPU 1,024).")  # fmt: skip
    serve.add_argument("--queue", metavar="N", type=int, default=256,
                       help="Let at most N requests wait (default: 256).")  # fmt: skip
    for name, number, what in (("timeout", 600.0, "End an answer after X seconds"),
                               ("grace", 30.0, "Give running requests X seconds when the server ends"),
                               ("cache-memory", 1.0, "Keep states of prompts in X GiB of memory")):  # fmt: skip
        serve.add_argument(f"--{name}", metavar="X", type=_number, default=number,
                           help=f"{what} (default: {number:g}).")  # fmt: skip
    serve.add_argument("--cache-dir", metavar="DIR", type=_path,
                       help="Keep states of prompts in this folder too (default: in memory only).")  # fmt: skip
    serve.add_argument("--cache-disk", metavar="X", type=_number,
                       help="Keep X GiB of these states in --cache-dir (default: 10).")  # fmt: skip
    serve.add_argument("--dtype", choices=about.DTYPES, default="auto", help=about.WEIGHTS)
    serve.add_argument("--device", default="auto", help=about.DEVICE)

    export = command("export", "Write a run as a folder for Hugging Face transformers.", about.EXPORT)
    export.add_argument("run", metavar="RUN", type=_path, help=about.RUN)
    export.add_argument("--out", metavar="DIR", type=_path, required=True,
                        help="Write the result into this folder, which is new or empty.")  # fmt: skip
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB",
                        help="Write weights in files of at most this size (default: 5GB).")  # fmt: skip

    convert = command("convert", "Convert a pretrained model into one with power attention.", about.CONVERT)
    convert.add_argument("model", metavar="MODEL", type=_path,
                         help="Read this model: a folder or an id of Hugging Face, or a GGUF file.")  # fmt: skip
    convert.add_argument("--out", metavar="DIR", type=_path, required=True,
                         help="Write the result into this folder, which is new or empty.")  # fmt: skip
    convert.add_argument("--pattern", metavar="LAYERS", default="power",
                         help="Repeat these kinds of layers, such as power*5,softmax (default: power).")  # fmt: skip
    convert.add_argument("--p", metavar="P", type=_positive, default=2,
                         help="Give new layers of power attention this power (default: 2).")  # fmt: skip
    convert.add_argument("--window", metavar="N", type=_positive, default=1024,
                         help="Give new layers of window attention N tokens (default: 1024).")  # fmt: skip

    distill = command("distill", "Train a converted model on its teacher, or continue.", about.DISTILL)
    distill.add_argument("run", metavar="DIR", type=_path, help="Train the model in this folder of `sympow convert`.")
    distill.add_argument("overrides", metavar="key=value", nargs="*", default=[],
                         help="Set a field of the run's config, such as data.path=docs/train.zarr.")  # fmt: skip
    distill.add_argument("--teacher", metavar="MODEL", type=_path, required=True,
                         help="Learn from this model: a run's folder, or what `sympow convert` reads.")  # fmt: skip
    distill.add_argument("--out", metavar="DIR", type=_path, required=True,
                         help="Write the run into this folder.")  # fmt: skip
    distill.add_argument("--restart", action="store_true",
                         help="First remove the files of an earlier run in the folder.")  # fmt: skip
    distill.add_argument("--quiet", action="store_true", help="Print the last line only, without progress.")

    sizes = command("sizes", "Print state sizes and FLOP ratios of a model shape.", about.SIZES)
    sizes.add_argument("preset", metavar="PRESET", nargs="?", default="small",
                       help="Use the shape of this preset (default: small).")  # fmt: skip
    sizes.add_argument("--body", choices=("gpt2", "llama", "rwkv7"), default="gpt2",
                       help="Use this body (default: gpt2).")  # fmt: skip
    for name, what, usual in (("d-model", "the width", "the preset's"),
                              ("layers", "the number of layers", "the preset's"),
                              ("heads", "the number of query heads", "the preset's"),
                              ("kv-heads", "the number of key/value heads", "that of query heads"),
                              ("key-dim", "the key dimension K", "the width over the query heads"),
                              ("value-dim", "the value dimension V", "K")):  # fmt: skip
        sizes.add_argument(f"--{name}", metavar="N", type=_positive, help=f"Set {what} (default: {usual}).")
    sizes.add_argument("--p", metavar="P", type=_positive, nargs="+", help="Show these powers (default: 2 3 4 5 6 8).")
    sizes.add_argument("--context", metavar="N", type=_positive, nargs="+",
                       help="Show these contexts, in tokens (default: 1024 8192 65536 1000000).")  # fmt: skip
    sizes.add_argument("--window", metavar="N", type=_positive,
                       help="Let window attention see N tokens (default: 8192).")  # fmt: skip
    sizes.add_argument("--element-bytes", metavar="N", type=_positive,
                       help="Count N bytes for an element of a state (default: 2).")  # fmt: skip
    sizes.add_argument("--json", action="store_true", help="Print exact numbers as JSON.")

    mqar = command("mqar", "Train on associative recall: one run, or a sweep.", about.MQAR)
    mqar.set_defaults(recipes=("RecallConfig", "Sweep"))
    mqar.add_argument("--list", nargs=0, action=_ListRecipes, help="List the recipes and exit.")
    mqar.add_argument("recipe", metavar="RECIPE",
                      help="Run this recipe: mqar:attention, mqar:widths or path/to/file.py:function.")  # fmt: skip
    mqar.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="Set a field of every run, such as learning_rate=1e-3.",
    )
    mqar.add_argument("--out", metavar="DIR", type=_path,
                      help="Write results into this folder (default: runs/NAME, with the sweep's name).")  # fmt: skip
    mqar.add_argument("--jobs", metavar="N", type=_positive, default=1, help="Do N runs at a time (default: 1).")
    executors = ("submitit", "slurm", "process")
    mqar.add_argument(
        "--executor",
        choices=executors,
        default="submitit",
        help="Run a sweep in local jobs of submitit, in jobs on Slurm, or in child processes (default: submitit).",
    )
    mqar.add_argument("--slurm", metavar="key=value", action="append", default=[],
                      help="Set a parameter of the jobs, such as slurm_partition=gpu; may be repeated.")  # fmt: skip
    mqar.add_argument("--device", default="auto", help=about.DEVICE)
    mqar.add_argument("--no-compile", action="store_true", help="Train without torch.compile on GPUs.")
    mqar.add_argument("--no-cuda-graphs", action="store_true", help="Train without CUDA graphs; some mixers need this.")
    mqar.add_argument("--tracker", choices=("wandb", "mlflow", "comet_ml"),
                      help="Send every validation to this service as well.")  # fmt: skip
    mqar.add_argument("--quiet", action="store_true", help="Print the results only, without progress.")

    figures = command("mqar-figures", "Draw the figures of associative recall.", about.MQAR_FIGURES)
    figures.add_argument("results", metavar="RESULTS", nargs="+", type=_path, help="Read the results.csv of a sweep.")
    figures.add_argument("--out", metavar="DIR", type=_path, required=True, help="Write the images into this folder.")

    own = command("corpus", "Make a corpus of long documents from texts of your own.", about.CORPUS)
    own.add_argument("texts", metavar="TEXTS", type=_path, help="Read the texts in this file or folder.")
    own.add_argument("--out", metavar="DIR", type=_path, required=True, help="Write the corpus into this folder.")
    own.add_argument(
        "--group",
        choices=("file", "folder"),
        default="file",
        help="Make a document of every file, or of the files directly in a folder (default: file).",
    )
    own.add_argument(
        "--suffixes",
        metavar="LIST",
        help="Read files with these endings only, such as .py,.md (default: every text file).",
    )
    own.add_argument(
        "--text-field",
        metavar="NAME",
        default="text",
        help="Read this field of JSON lines, Parquet and Arrow files (default: text).",
    )
    words = own.add_mutually_exclusive_group()
    words.add_argument("--vocab-size", metavar="N", type=_positive, help="Train a BPE of N tokens (default: 16,384).")
    words.add_argument("--tokenizer", metavar="FOLDER", type=_path,
                       help="Use this tokenizer.json, or that in this folder.")  # fmt: skip
    own.add_argument(
        "--row-tokens",
        metavar="N",
        type=_positive,
        help="Cut documents into rows of N tokens; shorter documents are left out (default: 65,536).",
    )
    own.add_argument("--plot", metavar="FILE", type=_path, help="Draw the lengths of documents into this image.")
    own.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")

    corpus = command("kernel-corpus", "Make a corpus of long documents from the Linux source.", about.KERNEL_CORPUS)
    corpus.add_argument("--out", metavar="DIR", type=_path, required=True, help="Write the corpus into this folder.")
    corpus.add_argument("--source", metavar="PATH", type=_path,
                        help="Read the kernel's source from this Debian package, tar archive or folder "
                             "(default: the package is fetched).")  # fmt: skip
    corpus.add_argument("--vocab-size", metavar="N", type=_positive,
                        help="Train a BPE of N tokens (default: 16,384).")  # fmt: skip
    corpus.add_argument("--row-tokens", metavar="N", type=_positive, help=about.ROW_TOKENS)
    corpus.add_argument("--plot", metavar="FILE", type=_path, help="Draw the lengths of documents into this image.")
    corpus.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")

    docs = command("doc-corpus", "Make a corpus of long prose from manuals.", about.DOC_CORPUS)
    docs.add_argument("--out", metavar="DIR", type=_path, required=True, help="Write the corpus into this folder.")
    docs.add_argument("--source", metavar="DIR", type=_path,
                      help="Read the Debian packages (*.deb) in this folder (default: they are fetched).")  # fmt: skip
    words = docs.add_mutually_exclusive_group()
    words.add_argument("--vocab-size", metavar="N", type=_positive, help="Train a BPE of N tokens (default: 16,384).")
    words.add_argument("--tokenizer", metavar="FOLDER", type=_path,
                       help="Use this tokenizer.json, or that in this folder, such as a teacher's.")  # fmt: skip
    docs.add_argument("--row-tokens", metavar="N", type=_positive, help=about.ROW_TOKENS)
    docs.add_argument("--plot", metavar="FILE", type=_path, help="Draw the lengths of documents into this image.")
    docs.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")

    for reader in (evaluate, hits, probe, passkey, generate, read, serve, export, distill):
        reader.add_argument("--trust-code", action="store_true", help=about.TRUST_CODE)

    demo = command("demo", "Train two small models, compare them, and continue a text with one.", about.DEMO)
    demo.add_argument(
        "--out",
        metavar="DIR",
        type=_path,
        default="runs/demo",
        help="Write the runs into this folder (default: runs/demo).",
    )
    demo.add_argument("--quiet", action="store_true", help="Show no progress.")
    return top


class _Parser(argparse.ArgumentParser):
    """Parses arguments, and prints errors in one line.

    A command may have the default `recipes`: the types that its recipes return. Then its help ends with a list of them.
    """

    def format_help(self) -> str:
        returned = self.get_default("recipes")
        return super().format_help() + (_recipe_list(returned) if returned else "")

    def error(self, message: str) -> NoReturn:
        _refuse(f"{message} (see {self.prog} --help)")


class _ListRecipes(argparse.Action):
    """Prints the recipes of a command and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(_recipe_list(parser.get_default("recipes")).lstrip())
        parser.exit()


def _recipe_list(returned: Sequence[str]) -> str:
    from sympow.recipes import describe_recipes

    recipes = describe_recipes(*returned)
    column = max(map(len, recipes)) + 4
    width = max(shutil.get_terminal_size().columns - 2, column + 20)
    lines = [
        textwrap.fill(line, width, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column)
        for name, line in recipes.items()
    ]
    return "\n".join(["", "recipes:", *lines, ""])


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be {'at least 1' if number < 1 else 'below 2**63'}, got {number}")
    return number


def _natural(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be {'at least 0' if number < 0 else 'below 2**63'}, got {number}")
    return number


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and at least 0, got {text}")
    return number


_number.__name__ = "number"
_positive.__name__ = _natural.__name__ = "integer"  # argparse says "invalid integer value"


def _path(text: str) -> str:
    """Returns the path. Refuses an empty path, such as an unset shell variable, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path cannot be empty")
    return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments of a command line; None: those of this process.

    Positional arguments may follow options, which argparse alone would refuse. Raises SystemExit for arguments that are
    not valid, after one line on stderr.
    """
    top = parser()
    options, more = top.parse_known_args(arguments)
    lists = {"train": "overrides", "distill": "overrides", "evaluate": "runs", "ar-hits": "runs",
             "recall-probe": "runs", "passkey": "runs", "mqar": "overrides", "mqar-figures": "results"}  # fmt: skip
    if more and (options.command not in lists or any(word.startswith("-") for word in more)):
        top.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        getattr(options, lists[options.command]).extend(more)
    if options.command == "train":
        _find_recipe(options)
    if options.command == "generate" and {options.context, options.prompt, options.prompt_file} == {None}:
        top.error("one of the arguments --prompt --prompt-file --context is required")
    if options.command == "serve" and options.cache_disk is not None and options.cache_dir is None:
        top.error("--cache-disk needs --cache-dir, the folder of the states on disk")
    return options


def _find_recipe(options: argparse.Namespace) -> None:
    """Takes the recipe from the positional arguments, wherever options stand between them."""
    words = [*([] if options.recipe is None else [options.recipe]), *options.overrides]
    options.recipe = words.pop(0) if words and "=" not in words[0] else None
    options.overrides = words
    if options.recipe is None and options.start is None:
        _refuse("the following arguments are required: RECIPE (see sympow train --help)")


def _refuse(line: str) -> NoReturn:
    _tell(line)
    raise SystemExit(2)


def _tell(line: str) -> None:
    """Prints an error. Of the processes that torchrun started, the first one prints it."""
    several = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("WORLD_SIZE", "1") != "1"
    if several:
        from sympow.cli.ranks import is_first

        if not is_first(line):
            return
    print(f"sympow: error: {line}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, MemoryError | RuntimeError):
        from sympow.ops.memory import allocation_error

        if (line := allocation_error(error)) is not None:
            return line
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    return str(error).strip().split("\n")[0] or type(error).__name__
