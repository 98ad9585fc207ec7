"""A run folder of version 0.1: it loads, gives the numbers it gave, and says what it is.

tests/training/older_run was written by version 0.1 (commit 2e63c2e): power attention as it was by default, with a norm
of the heads' outputs, and behind a short convolution; linear attention.
"""

import shutil
from pathlib import Path

import pytest
import torch

from sympow.training import load_model
from sympow.training.run_folder import check_config, read_config

RUN = Path(__file__).parent / "older_run"
LOGITS = [-0.08766920864582062, -0.015674317255616188, 0.014749914407730103, -0.11393747478723526, 0.06718852370977402,
          -0.01777391880750656, 0.06671787798404694, 0.10602933168411255, 0.23127590119838715, 0.010848299600183964,
          0.15273551642894745]  # fmt: skip


@torch.no_grad()
def test_it_gives_the_numbers_it_gave():
    loaded = load_model(RUN)
    logits = loaded.model(torch.arange(20)[None] % 11)[0, -1]
    torch.testing.assert_close(logits, torch.tensor(LOGITS), rtol=1e-4, atol=1e-6)
    assert loaded.older


def test_its_config_says_what_it_has():
    config = read_config(RUN)
    first = config.model.mixer(0).options
    assert (first["short_convolution"], first["head_norm"], first["output_gate"]) == (0, False, False)
    assert config.model.mixer(1).options["head_norm"] is True
    assert type(config).from_dict(config.to_dict()) == config


def test_going_on_with_another_config_tells_its_version(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    config = read_config(RUN)
    stored = config.to_dict() | {"name": "other"}
    del stored["model"]["body"]
    with pytest.raises(ValueError, match=r"holds a run of version 0\.1 with name = 'other', not 'older'"):
        check_config(stored, config, tmp_path)
