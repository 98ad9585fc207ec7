"""Converts pretrained models into run folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sympow.conversion import parse_pattern, swap_mixers
from sympow.conversion.swap import keeps_layers
from sympow.data import BPETokenizer, DataConfig
from sympow.models import LanguageModel
from sympow.training import RunConfig, TrainingConfig
from sympow.training.run_folder import new_folder, write_run_folder


def convert_model(
    source: str, out: str | os.PathLike[str], *, pattern: str, p: int, window: int
) -> tuple[Path, LanguageModel]:
    """Reads a pretrained model, swaps its mixers and writes the result as a run folder of 0 steps.

    Args:
        source: as for `load_pretrained`.
        out: a new or an empty folder.
        pattern: as for `parse_pattern` and `swap_mixers`.
        p: as for `parse_pattern` and `swap_mixers`.
        window: as for `parse_pattern` and `swap_mixers`.

    A line on stderr says if the model's tokenizer does not keep texts as they are.

    Returns the folder and the model. Raises the errors of these functions, and FileNotFoundError for a model without a
    tokenizer.
    """
    from sympow.integrations.transformers.pretrained import load_pretrained  # which imports transformers

    kinds, folder = parse_pattern(pattern), new_folder(out)
    pretrained = load_pretrained(source)
    if pretrained.tokenizer is None:
        raise FileNotFoundError(f"{source} has no tokenizer.json: a converted model reads and writes text by it")
    model = pretrained.model
    if not keeps_layers(model.config, kinds, p):  # a copy of a large model would not fit in memory
        model = swap_mixers(model, kinds, p=p, window=window)
    training = TrainingConfig(context=pretrained.context, steps=1, warmup_steps=0)
    config = RunConfig(folder.resolve().name, model.config, DataConfig(), training)
    written = write_run_folder(folder, config, model, tokenizer=pretrained.tokenizer, beside=pretrained.beside)
    if BPETokenizer(pretrained.tokenizer).normalizes:
        print(f"the tokenizer of {source} puts texts into the Unicode form NFC", file=sys.stderr)
    return written, model
