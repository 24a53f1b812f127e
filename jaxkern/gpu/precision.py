"""How exactly float32 is multiplied on a GPU's tensor cores."""

from typing import Any

import jax.numpy as jnp

from jaxkern.primitives.call import matmul_precision

# Values of `jax_default_matmul_precision` that one TF32 product does not reach. At all
# others, "high" included, XLA too multiplies float32 as TF32 on these GPUs.
EXACT = frozenset(
    (
        "highest",
        "float32",
        "BF16_BF16_F32_X3",
        "BF16_BF16_F32_X6",
        "BF16_BF16_F32_X9",
        "TF32_TF32_F32_X3",
        "F32_F32_F32",
        "F64_F64_F64",
    )
)


def one_product(dtype: Any) -> bool:
    """Whether float32 is multiplied as TF32, not by three such products."""
    return dtype == jnp.float32 and matmul_precision() not in EXACT
