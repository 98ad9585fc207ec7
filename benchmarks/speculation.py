"""Measures speculative decoding: `python -m benchmarks.speculation RUN --csv FILE`, one row of text at a time.

Prompts are parts of held-out documents ("documents"), or random tokens ("random"). Each prompt is continued without
drafts and then with drafts, at temperature 0 and at temperature 1 with one seed, so that a machine that slows down does
so for both. The tokens must be the same. Times are those of decoding alone.

A small model repeats itself at temperature 0, which helps prompt lookup. `distinct` measures this: it is the share of
distinct tokens in the new text.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.common.measure import measured, options, write
from sympow.data import open_corpus
from sympow.models import Drafts, Generation, ModelDrafts, NgramDrafts, generate
from sympow.progress import Progress
from sympow.training import Run, load

TEXTS = ("documents", "random")


def prompts(run: Run, text: str, length: int, count: int) -> list[Tensor]:
    """Returns `count` prompts [1, length] of a kind of `TEXTS`."""
    if text == "documents":
        return parts(open_corpus(run.config.data, tokenizer=run.tokenizer).held_out, length, count)
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(run.model.config.vocab_size, (count, 1, length), generator=generator))


def parts(documents, length: int, count: int) -> list[Tensor]:
    """Returns `count` parts [1, length] of documents, none twice: the beginnings first, then what follows them."""
    found: list[Tensor] = []
    for start in range(0, int(documents.lengths.max()), length):
        for i in (i for i, has in enumerate(documents.lengths) if has >= start + length and len(found) < count):
            found.append(torch.from_numpy(documents[i][start : start + length].astype("int64"))[None])
    if len(found) < count:
        raise ValueError(f"{count} parts of {length:,} tokens are needed; the held-out documents have {len(found)}")
    return found


def measure(run: Run, draft: Run | None, text: str, temperature: float, arguments: argparse.Namespace) -> dict:
    """Returns the row of a text, a temperature and the drafts."""
    drafts: Drafts = NgramDrafts() if draft is None else ModelDrafts(draft.model)
    seconds, same, proposed, accepted, distinct = [0.0, 0.0], 0, 0, 0, 0.0
    count = arguments.prompts if (text, temperature) == (TEXTS[0], 0) else max(1, arguments.prompts // 4)
    rows = prompts(run, text, arguments.prompt, count)
    what = f"{text}, temperature {temperature:g}"
    with Progress(what, "prompt", total=len(rows)) as progress:
        for i, prompt in enumerate(rows):
            results: list[Generation | None] = [None, None]
            for drafted in (i % 2, 1 - i % 2):
                how = {"temperature": temperature, "seed": i, "drafts": drafts if drafted else None}
                result = generate(run.model, prompt, arguments.tokens, **how)
                seconds[drafted] += result.decode_seconds
                results[drafted] = result
            plain, fast = (each.tokens for each in results if each is not None)
            same += torch.equal(plain, fast)
            distinct += len(plain.unique()) / arguments.tokens
            proposed, accepted = proposed + drafts.proposed, accepted + drafts.accepted
            progress.advance()
    decoded = len(rows) * (arguments.tokens - 1)
    return {
        "text": text,
        "temperature": temperature,
        "drafts": "n-grams" if draft is None else draft.config.name,
        "model": run.config.name,
        "prompts": len(rows),
        "prompt_tokens": arguments.prompt,
        "new_tokens": arguments.tokens,
        "distinct": round(distinct / len(rows), 3),
        "same_tokens": same,
        "proposed": proposed,
        "accepted": accepted,
        "plain_tokens_per_second": decoded / seconds[0],
        "tokens_per_second": decoded / seconds[1],
        "ratio": seconds[0] / seconds[1],
    }


def main() -> None:
    """Prints a row each for texts, temperatures and drafts, and writes them to a file."""
    parser = options("benchmarks.speculation", __doc__)
    parser.add_argument("run", help="a run's folder or a checkpoint")
    parser.add_argument("--draft", metavar="RUN", help="a smaller run with the same tokenizer, for more rows")
    parser.add_argument("--prompts", type=int, default=200,
                        help="documents at temperature 0; elsewhere a quarter (default: 200)")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (default: 256)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens written behind it (default: 64)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = load(arguments.run, arguments.device)
    drafts = [None] if arguments.draft is None else [None, load(arguments.draft, arguments.device)]
    about = measured(arguments.device)
    for each in (run, *drafts):  # compiles kernels, so that no row does
        if each is not None:
            generate(each.model, torch.zeros(1, 8, dtype=torch.int64).repeat(1, 8), 64, drafts=NgramDrafts())
    rows = []
    for draft in drafts:
        for text in TEXTS:
            for temperature in (0.0, 1.0):
                row = measure(run, draft, text, temperature, arguments)
                rows.append(row | about)
                print(
                    f"{text}, temperature {temperature:g}, {row['drafts']}: {row['ratio']:.2f}x "
                    f"({row['plain_tokens_per_second']:,.0f} to {row['tokens_per_second']:,.0f} tokens/s), "
                    f"{row['accepted']:,} of {row['proposed']:,} draft tokens accepted, "
                    f"distinct {row['distinct']:.2f}, same tokens for {row['same_tokens']} of {row['prompts']}"
                )
                write(arguments.csv, rows)


if __name__ == "__main__":
    main()
