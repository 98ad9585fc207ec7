"""Errors of several ranks: torchrun's processes mostly fail with the same line, which one of them prints."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

WAIT = timedelta(seconds=10)  # for torchrun's store, which lives longer than the processes


def is_first(line: str) -> bool:
    """Tells whether no other rank of this start has asked about the same line.

    Without torchrun, and if its store does not answer, every rank is the first.
    """
    from torch.distributed import TCPStore

    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=WAIT)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"sympow/{start}/{hashlib.sha256(line.encode()).hexdigest()}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True
