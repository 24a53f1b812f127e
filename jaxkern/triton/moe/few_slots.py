"""What kernels take that read the experts of a few tokens slot by slot."""

import math
from typing import Any

import jax.numpy as jnp

from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.moe.moe_ffn import FEW_TOKENS

CHOSEN = 16  # of a token: their loop is unrolled


def refusal(x: Any, ids: Any, **named: Any) -> str | None:
    """Why no kernel runs, or None; x `[..., d]`, ids `[..., k]`."""
    if reason := unsupported_anywhere(x=x, **named):
        return reason
    if x.dtype != jnp.bfloat16:
        return f"`x` is {x.dtype}, not bfloat16"
    given = [a for a in (x, ids, *named.values()) if a is not None]
    if not all(math.prod(a.shape) for a in given):
        return "there are no elements"
    tokens, k = math.prod(ids.shape[:-1]), ids.shape[-1]
    if tokens > FEW_TOKENS:
        return f"there are {tokens} tokens, over {FEW_TOKENS}"
    if k > CHOSEN:
        return f"a token has {k} experts, over {CHOSEN}"
    return None
