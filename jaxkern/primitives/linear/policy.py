"""`policy`: the dtypes in which linear layers compute, chosen around a call.

| name | weights | compute | sums | result |
|---|---|---|---|---|
| "f32" | float32 | float32, highest precision | float32 | as `x` |
| "bf16" | bfloat16 | bfloat16 | float32 | as `x` |
| "f16" | float16 | float16 | float32 | as `x` |
| "fp8" | float8_e4m3fn, a scale a matrix | bfloat16 | float32 | as `x` |

`linear` reads compute, sums and result when it is called, `runtime.upload` the weights.
Every other op is untouched: norms, softmax and logsumexp keep their statistics in
float32 under any policy.
"""

import dataclasses
import threading
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of linear layers; as a context, those of the block.

    Attributes:
      name: "f32", "bf16", "f16" or "fp8".
      weights: dtype in which `upload` stores matrices.
      compute: dtype to which the operands of a product are rounded.
      accum: dtype of its sums.
      output: dtype of its result; None for that of `x`.
    """

    name: str
    weights: jnp.dtype
    compute: jnp.dtype
    accum: jnp.dtype
    output: jnp.dtype | None = None

    @property
    def precision(self) -> jax.lax.Precision | None:
        """Float32 means float32 and not tf32; of narrow operands products are exact."""
        exact = self.compute == jnp.float32
        return jax.lax.Precision.HIGHEST if exact else None

    def __enter__(self) -> Self:
        entered = policy_context(self)
        entered.__enter__()
        _blocks.__dict__.setdefault("open", []).append(entered)
        return self

    def __exit__(self, *error: object) -> None:
        _blocks.open.pop().__exit__(*error)

    def __str__(self) -> str:
        return (
            f"{self.name}: weights {self.weights}, compute {self.compute}, sums "
            f"{self.accum}, result {self.output or 'as x'}"
        )


DTYPES = {  # weights, compute
    "f32": (jnp.float32, jnp.float32),
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "f16": (jnp.float16, jnp.float16),
    "fp8": (jnp.float8_e4m3fn, jnp.bfloat16),  # float16 would overflow beyond 65504
}

# Part of what jit looks up: another policy traces anew, None costs nothing.
policy_context = jax.make_user_context(None)
_blocks = threading.local()  # the blocks that each thread is in


def policy(name: str, *, output: DTypeLike | None = None) -> Policy:
    """A policy: a context for the calls in its block, and its dtypes to look at.

        with policy("bf16"):
            y = model(x)  # products in bfloat16, sums in float32
        policy("bf16").compute  # dtype("bfloat16")

    The choice is made when `linear` is called (under `jit`: traced); gradients follow
    what was traced. Blocks nest, the innermost counts; another thread is not in them.

    Args:
      name: "f32", "bf16", "f16" or "fp8".
      output: dtype of the result of a linear layer; None for that of `x`.

    Raises:
      ValueError: no such policy.

    Example:
      >>> from jaxkern import runtime
      >>> x = jnp.array([[1.002, 1.0]])  # bfloat16 has no 1.002
      >>> with runtime.policy("bf16"):
      ...     jaxkern.linear(x, jnp.ones((1, 2)))
      Array([[2.]], dtype=float32)
    """
    if name not in DTYPES:
        raise ValueError(f"policy: must be one of {', '.join(DTYPES)}, got {name!r}.")
    weights, compute = map(jnp.dtype, DTYPES[name])
    result = None if output is None else jnp.dtype(output)
    return Policy(name, weights, compute, jnp.dtype(jnp.float32), result)


def current_policy() -> Policy | None:
    """The policy of the block that this thread is in; None for the operands' dtypes.

    Example:
      >>> from jaxkern import runtime
      >>> with runtime.policy("f16"):
      ...     runtime.current_policy().compute
      dtype('float16')
    """
    return policy_context.value
