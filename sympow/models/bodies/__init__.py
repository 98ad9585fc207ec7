"""The bodies by name: the blocks of a language model around its mixers. docs/guides/bodies.md compares them."""

from sympow.models.bodies.base import Block
from sympow.models.bodies.gpt2 import GPT2Block
from sympow.models.bodies.llama import LlamaBlock
from sympow.models.bodies.rwkv7 import RWKV7Block

BODIES: dict[str, type[Block]] = {"gpt2": GPT2Block, "llama": LlamaBlock, "rwkv7": RWKV7Block}

__all__ = ["BODIES", "Block", "GPT2Block", "LlamaBlock", "RWKV7Block"]
