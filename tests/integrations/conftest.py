"""Fixtures for models in transformers; their tests are left out where transformers is not installed."""

import importlib.util

import pytest
import torch

from tests.integrations.small import CASES, VOCAB, small_model

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_transformers*.py"]


@pytest.fixture(params=CASES)
def native(request):
    return small_model(request.param)


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (4, 21), generator=torch.Generator().manual_seed(3))
