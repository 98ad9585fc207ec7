"""For every test here: none meets a plan that was made under another configuration."""

import pytest


@pytest.fixture(autouse=True)
def no_plans():
    plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
    plan.forget_plans()
    yield
    plan.forget_plans()
