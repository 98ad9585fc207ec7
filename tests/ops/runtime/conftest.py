"""For every test here: none meets a plan that was made under another configuration."""

from tests.ops.triton.conftest import no_plans

__all__ = ["no_plans"]
