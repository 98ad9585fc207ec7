"""Measures passkey recall of runs and of folders of Hugging Face transformers, for `sympow passkey`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sympow.cli.scored import Scored
from sympow.evaluation.passkey import Continue, PasskeyRow, native, passkey_recall, transformers
from sympow.models import LanguageModel


def measure_passkeys(
    models: Mapping[str, Scored], contexts: Sequence[int], *, texts: int, seed: int, quiet: bool
) -> list[PasskeyRow]:
    """Measures recall of all models by label, at every context and depth; options as for `passkey_recall`.

    Raises ValueError for a model without a tokenizer.
    """
    rows = []
    for label, scored in models.items():
        if scored.tokenizer is None:
            raise ValueError(f"{label} has no tokenizer: passkeys are texts")
        rows += passkey_recall(
            label, _continues(scored), scored.tokenizer, contexts, texts=texts, seed=seed, quiet=quiet
        )
    return rows


def _continues(scored: Scored) -> Continue:
    if isinstance(scored.model, LanguageModel):
        return native(scored.model)
    return transformers(scored.model.model)
