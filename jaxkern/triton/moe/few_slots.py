"""What kernels of experts take, and those that read a few tokens' slot by slot."""

import math
from typing import Any

import jax.numpy as jnp

from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.moe.moe_ffn import FEW_TOKENS

CHOSEN = 16  # of a token: their loop is unrolled


def refusal(x: Any, ids: Any, **named: Any) -> str | None:
    """Why no kernel for a few tokens runs, or None; x `[..., d]`, ids `[..., k]`."""
    if reason := refusal_of_operands(x, ids, **named):
        return reason
    if are_many(ids):
        return f"there are {math.prod(ids.shape[:-1])} tokens, over {FEW_TOKENS}"
    if ids.shape[-1] > CHOSEN:
        return f"a token has {ids.shape[-1]} experts, over {CHOSEN}"
    return None


def are_many(ids: Any) -> bool:
    """Whether there are too many tokens to read experts slot by slot."""
    return math.prod(ids.shape[:-1]) > FEW_TOKENS


def refusal_of_operands(x: Any, ids: Any, **named: Any) -> str | None:
    """Why no kernel runs for any number of tokens, or None."""
    if reason := unsupported_anywhere(x=x, **named):
        return reason
    if x.dtype != jnp.bfloat16:
        return f"`x` is {x.dtype}, not bfloat16"
    given = [a for a in (x, ids, *named.values()) if a is not None]
    if not all(math.prod(a.shape) for a in given):
        return "there are no elements"
    return None
