"""The texts of the task "passkeys" of lm-evaluation-harness."""

import random
from typing import Any

import datasets

from sympow.evaluation.passkey import DEPTHS, FILLER, NEEDLE, QUESTION

LENGTH = 4000  # characters
TEXTS = 40


def texts(**_: Any) -> dict[str, datasets.Dataset]:
    """Makes texts with a number each, the depths in turn."""
    draw, rows = random.Random(0), []
    filler = (FILLER * LENGTH)[:LENGTH]
    for number in range(TEXTS):
        key = str(draw.randrange(10_000, 100_000))
        place = filler.rfind(" ", 0, round(DEPTHS[number % len(DEPTHS)] * LENGTH)) + 1
        rows.append({"text": filler[:place] + NEEDLE.format(key=key) + filler[place:] + QUESTION, "key": key})
    return {"test": datasets.Dataset.from_list(rows)}
