"""The command line: this file parses options. `commands` does the work and is imported only then."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from sympow.cli import descriptions as about


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0; 2 after an error, told in one line; 130 after Ctrl-C.

    A run that a signal stopped after saving a checkpoint gives 128 + the signal's number, as a shell would.
    """
    try:
        options = parse(arguments)
        from sympow.cli import commands

        code = getattr(commands, options.command.replace("-", "_"))(options)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # a reader such as `head` has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        if options.traceback:
            raise
        print(f"sympow: error: {_one_line(error)}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Returns the commands and their options."""
    common = _Parser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    top = _Parser(prog="sympow", description="Power attention: train, evaluate and sample language models.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=description, parents=[common])

    train = command("train", "train a recipe, or continue it", about.TRAIN)
    train.set_defaults(recipes=("RunConfig",))
    train.add_argument("--list", nargs=0, action=_ListRecipes, help="list the recipes and exit")
    train.add_argument("recipe", metavar="RECIPE", help="demo:softmax, path/to/file.py:function, module:function")
    train.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="fields, such as training.learning_rate=1e-3"
    )
    train.add_argument("--out", metavar="DIR", type=_path, help="the run's folder (default: runs/ and the run's name)")
    train.add_argument("--restart", action="store_true", help="remove what the folder holds of an earlier run")
    train.add_argument("--quiet", action="store_true", help="no progress, only the last line")

    evaluate = command("evaluate", "held-out loss by context position", about.EVALUATE)
    evaluate.add_argument("runs", metavar="RUN", nargs="+", type=_path, help="a run's folder or a checkpoint")
    evaluate.add_argument(
        "--context", metavar="N", type=_positive, help="tokens to predict in a row (default: 4 x the trained)"
    )
    evaluate.add_argument("--rows", metavar="N", type=_positive, default=16, help="rows to average over (default: 16)")
    evaluate.add_argument("--data", metavar="key=value", action="append", default=[],
                          help="another corpus than the run's own, such as kind=text; may be repeated")  # fmt: skip
    evaluate.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    evaluate.add_argument("--csv", metavar="FILE", type=_path, help="write the losses to a file")
    evaluate.add_argument("--plot", metavar="FILE", type=_path, help="draw the curves of all runs into one image")

    hits = command("ar-hits", "loss where a token could be recalled from its context", about.AR_HITS)
    hits.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.SCORED)
    hits.add_argument("--data", metavar="key=value", action="append", default=[],
                      help="another corpus than the first run's own, such as kind=text; may be repeated")  # fmt: skip
    hits.add_argument(
        "--context", metavar="N", type=_positive, help="tokens to predict in a row (default: the shortest trained)"
    )
    hits.add_argument("--rows", metavar="N", type=_positive, default=64, help="rows to average over (default: 64)")
    hits.add_argument("--frequent", metavar="N", type=int, default=1250,
                      help="a bigram that training holds more often is no AR hit (default: 1250)")  # fmt: skip
    hits.add_argument("--count-tokens", metavar="N", type=_positive,
                      help="count bigrams in about so many tokens of training (default: all)")  # fmt: skip
    hits.add_argument("--csv", metavar="FILE", type=_path, help="write losses and gaps to a file")
    hits.add_argument("--plot", metavar="FILE", type=_path, help="draw losses by count and distance into one image")
    hits.add_argument("--html", metavar="FILE", type=_path, help="write rows of text in colour as a page")
    hits.add_argument("--examples", metavar="N", type=_positive, default=4, help="rows of the page (default: 4)")
    hits.add_argument("--show", metavar="N", type=_positive, help="print the last N tokens of a row in colour")
    hits.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    hits.add_argument("--quiet", action="store_true", help="no progress, only the results")

    probe = command("recall-probe", "ask a trained model for values behind keys", about.RECALL_PROBE)
    probe.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.SCORED)
    probe.add_argument("--pairs", metavar="P", type=_positive, nargs="+",
                       help="pairs in a row (default: 16 32 64 128 256, as far as the vocabulary goes)")  # fmt: skip
    probe.add_argument("--queries", metavar="N", type=_positive, default=2048,
                       help="values to ask for, for every P (default: 2048)")  # fmt: skip
    probe.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the passages (default: 0)")
    probe.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")

    passkey = command("passkey", "recall of a number in a long text", about.PASSKEY)
    passkey.add_argument("runs", metavar="RUN", nargs="+", type=_path, help=about.SCORED)
    passkey.add_argument("--context", metavar="N", type=_positive, nargs="+", default=[1024, 2048, 4096],
                         help="tokens of a text (default: 1024 2048 4096)")  # fmt: skip
    passkey.add_argument("--texts", metavar="N", type=_positive, default=20, help="texts at each depth (default: 20)")
    passkey.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the numbers (default: 0)")
    passkey.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    passkey.add_argument("--csv", metavar="FILE", type=_path, help="write the rows to a file")
    passkey.add_argument("--plot", metavar="FILE", type=_path, help="draw accuracy by context and depth into an image")
    passkey.add_argument("--quiet", action="store_true", help="no progress, only the result")

    generate = command("generate", "continue a text", about.GENERATE)
    generate.add_argument("run", metavar="RUN", type=_path, help="a run's folder or a checkpoint")
    generate.add_argument("--context", metavar="FILE", type=_path, help="continue from a file that `sympow read` wrote")
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; not needed behind a context")
    prompt.add_argument("--prompt-file", metavar="FILE", type=_path, help="file of the prompt; - for standard input")
    generate.add_argument("--max-new-tokens", metavar="N", type=int, default=256, help="most new tokens (default: 256)")
    generate.add_argument(
        "--temperature", metavar="X", type=float, default=1.0, help="0: the likeliest token (default: 1)"
    )
    generate.add_argument("--top-k", metavar="K", type=int, help="draw from the K likeliest tokens")
    generate.add_argument(
        "--top-p", metavar="P", type=float, help="draw from the fewest tokens that hold probability P"
    )
    generate.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the draws (default: 0)")
    drafts = generate.add_mutually_exclusive_group()
    drafts.add_argument("--speculate", action="store_true",
                        help="draft tokens by prompt lookup: the same text in fewer steps")  # fmt: skip
    drafts.add_argument("--draft", metavar="RUN", type=_path,
                        help="draft tokens with a smaller run that has the same tokenizer")  # fmt: skip
    generate.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")

    read = command("read", "read a text into a context file", about.READ)
    read.add_argument("run", metavar="RUN", type=_path, help="a run's folder or a checkpoint")
    read.add_argument("text", metavar="TEXT", type=_path, help="the file to read; - for standard input")
    read.add_argument("--out", metavar="FILE", type=_path, required=True, help="the context file")
    read.add_argument("--context", metavar="FILE", type=_path, help="read on behind another context file")
    read.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32",
                      help="dtype of the states in the file; float32 is exact (default: float32)")  # fmt: skip
    read.add_argument("--chunk", metavar="N", type=_positive, default=1024, help="tokens a step (default: 1024)")
    read.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    read.add_argument("--quiet", action="store_true", help="no progress, only the last line")

    serve = command("serve", "serve a model over HTTP, as OpenAI's interface does", about.SERVE)
    serve.add_argument("folder", metavar="DIR", type=_path, help="a run's folder, or one written by `sympow export`")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", metavar="N", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    serve.add_argument("--name", help="name of the model for clients (default: that of the folder)")
    serve.add_argument("--api-keys", metavar="FILE", type=_path,
                       help="keys, one a line (default: $SYMPOW_API_KEYS, separated by commas; or none)")  # fmt: skip
    for name, count, what in (("slots", 16, "requests answered at a time"),
                              ("max-prompt-tokens", 1_000_000, "of a prompt"),
                              ("max-new-tokens", 4096, "of an answer")):  # fmt: skip
        serve.add_argument(f"--{name}", metavar="N", type=_positive, default=count, help=f"{what} (default: {count:,})")
    serve.add_argument("--prefill-chunk", metavar="N", type=_positive,
                       help="tokens of a prompt read at a time (default: 256; on a GPU 1,024)")  # fmt: skip
    serve.add_argument("--queue", metavar="N", type=int, default=256, help="requests that may wait (default: 256)")
    for name, number, what in (("timeout", 600.0, "seconds for an answer"), ("grace", 30.0, "seconds to end in"),
                               ("cache-memory", 1.0, "GiB of states of prompts in memory"),
                               ("cache-disk", 10.0, "GiB of them in the folder")):  # fmt: skip
        serve.add_argument(f"--{name}", metavar="X", type=_number, default=number, help=f"{what} (default: {number:g})")
    serve.add_argument("--cache-dir", metavar="DIR", type=_path, help="folder to keep states of prompts in")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")

    export = command("export", "write a run for Hugging Face transformers", about.EXPORT)
    export.add_argument("run", metavar="RUN", type=_path, help="a run's folder or a checkpoint")
    export.add_argument("--out", metavar="DIR", type=_path, required=True, help="a new or an empty folder")
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="size of a weight file (default: 5GB)")

    convert = command("convert", "turn a pretrained model into one with power attention", about.CONVERT)
    convert.add_argument("model", metavar="MODEL", type=_path, help="a folder or id of Hugging Face, or a GGUF file")
    convert.add_argument("--out", metavar="DIR", type=_path, required=True, help="a new or an empty folder")
    convert.add_argument("--pattern", metavar="LAYERS", default="power",
                         help="kinds of layers, repeated, such as power*5,softmax (default: power)")  # fmt: skip
    convert.add_argument("--p", metavar="P", type=_positive, default=2, help="power of the new layers (default: 2)")
    convert.add_argument("--window", metavar="N", type=_positive, default=1024, help="size of a window (default: 1024)")

    distill = command("distill", "train a converted model on its teacher, or continue", about.DISTILL)
    distill.add_argument("run", metavar="DIR", type=_path, help="what `sympow convert` wrote")
    distill.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="fields, such as data.path=docs/train.zarr"
    )
    distill.add_argument("--teacher", metavar="MODEL", type=_path, required=True, help="a run's folder, or as above")
    distill.add_argument("--out", metavar="DIR", type=_path, required=True, help="the folder of the trained model")
    distill.add_argument("--quiet", action="store_true", help="no progress, only the last line")

    sizes = command("sizes", "state sizes and FLOP ratios of a model shape", about.SIZES)
    sizes.add_argument("preset", metavar="PRESET", nargs="?", default="small", help="the shape (default: small)")
    sizes.add_argument("--body", choices=("gpt2", "llama", "rwkv7"), default="gpt2", help="the body (default: gpt2)")
    for name, what in (("d-model", "width"), ("layers", "layers"), ("heads", "query heads"),
                       ("kv-heads", "key/value heads"), ("key-dim", "K"), ("value-dim", "V")):  # fmt: skip
        sizes.add_argument(f"--{name}", metavar="N", type=_positive, help=f"{what}, in place of the preset's")
    sizes.add_argument("--p", metavar="P", type=_positive, nargs="+", help="powers to show")
    sizes.add_argument("--context", metavar="N", type=_positive, nargs="+", help="contexts to show, in tokens")
    sizes.add_argument("--window", metavar="N", type=_positive, help="tokens that window attention sees")
    sizes.add_argument("--element-bytes", metavar="N", type=_positive, help="bytes of an element of a state")
    sizes.add_argument("--json", action="store_true", help="exact numbers as JSON")

    mqar = command("mqar", "train on associative recall: one run, or a sweep", about.MQAR)
    mqar.set_defaults(recipes=("RecallConfig", "Sweep"))
    mqar.add_argument("--list", nargs=0, action=_ListRecipes, help="list the recipes and exit")
    mqar.add_argument("recipe", metavar="RECIPE", help="mqar:attention, mqar:widths, path/to/file.py:function")
    mqar.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="a field of every run, such as learning_rate=1e-3"
    )
    mqar.add_argument("--out", metavar="DIR", type=_path, help="the folder (default: runs/ and the sweep's name)")
    mqar.add_argument("--jobs", metavar="N", type=_positive, default=1, help="runs at a time (default: 1)")
    executors = ("submitit", "slurm", "process")
    mqar.add_argument(
        "--executor", choices=executors, default="submitit", help="of a sweep: jobs, here or on Slurm, or processes"
    )
    mqar.add_argument("--slurm", metavar="key=value", action="append", default=[],
                      help="a parameter of the jobs, such as slurm_partition=gpu; may be repeated")  # fmt: skip
    mqar.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    mqar.add_argument("--no-compile", action="store_true", help="train without torch.compile on GPUs")
    mqar.add_argument("--no-cuda-graphs", action="store_true", help="use no CUDA graphs; some mixers need this")
    mqar.add_argument("--tracker", choices=("wandb",), help="send every validation to this service as well")
    mqar.add_argument("--quiet", action="store_true", help="no progress, only the results")

    figures = command("mqar-figures", "draw the figures of associative recall", about.MQAR_FIGURES)
    figures.add_argument("results", metavar="RESULTS", nargs="+", type=_path, help="results.csv of a sweep")
    figures.add_argument("--out", metavar="DIR", type=_path, required=True, help="folder for the images")

    corpus = command("kernel-corpus", "make a corpus of long documents", about.KERNEL_CORPUS)
    corpus.add_argument("--out", metavar="DIR", type=_path, required=True, help="the corpus's folder")
    corpus.add_argument("--source", metavar="PATH", type=_path,
                        help="a Debian package, tar archive or folder with the kernel's source")  # fmt: skip
    corpus.add_argument("--vocab-size", metavar="N", type=_positive, help="tokens of the BPE (default: 16,384)")
    corpus.add_argument("--plot", metavar="FILE", type=_path, help="draw the lengths of its documents into an image")
    corpus.add_argument("--quiet", action="store_true", help="no progress, only the result")

    docs = command("doc-corpus", "make a corpus of long prose", about.DOC_CORPUS)
    docs.add_argument("--out", metavar="DIR", type=_path, required=True, help="the corpus's folder")
    docs.add_argument("--source", metavar="DIR", type=_path, help="a folder with Debian packages (*.deb)")
    words = docs.add_mutually_exclusive_group()
    words.add_argument("--vocab-size", metavar="N", type=_positive, help="tokens of the BPE (default: 16,384)")
    words.add_argument("--tokenizer", metavar="FOLDER", type=_path,
                       help="an existing one, such as a teacher's: a tokenizer.json or its folder")  # fmt: skip
    docs.add_argument("--plot", metavar="FILE", type=_path, help="draw the lengths of its documents into an image")
    docs.add_argument("--quiet", action="store_true", help="no progress, only the result")

    demo = command("demo", "train, compare and sample two small models", about.DEMO)
    demo.add_argument(
        "--out", metavar="DIR", type=_path, default="runs/demo", help="folder of the runs (default: runs/demo)"
    )
    demo.add_argument("--quiet", action="store_true", help="show no progress")
    return top


class _Parser(argparse.ArgumentParser):
    """Parses arguments, with errors of one line.

    The help of a command with the default `recipes`, the types that its recipes return, ends with a list of them.
    """

    def format_help(self) -> str:
        returned = self.get_default("recipes")
        return super().format_help() + (_recipe_list(returned) if returned else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sympow: error: {message} (see {self.prog} --help)\n")


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
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and at least 0, got {text}")
    return number


_number.__name__ = "number"
_positive.__name__ = "integer"  # argparse says "invalid integer value"


def _path(text: str) -> str:
    """Returns the path; refuses an empty one, as from an unset shell variable, which would mean this folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path cannot be empty")
    return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options that the words of a command line say; None: those of this process.

    Words after an option count as words before it, which argparse alone would refuse. Raises SystemExit for words that
    are no command, after one line on stderr.
    """
    top = parser()
    options, more = top.parse_known_args(arguments)
    lists = {"train": "overrides", "distill": "overrides", "evaluate": "runs", "ar-hits": "runs",
             "recall-probe": "runs", "passkey": "runs", "mqar": "overrides", "mqar-figures": "results"}  # fmt: skip
    if more and (options.command not in lists or any(word.startswith("-") for word in more)):
        top.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        getattr(options, lists[options.command]).extend(more)
    if options.command == "generate" and {options.context, options.prompt, options.prompt_file} == {None}:
        top.error("one of the arguments --prompt --prompt-file is required")
    return options


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error).strip().split("\n")[0] or type(error).__name__
