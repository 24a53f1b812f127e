"""Random rotation: R = d^-1/2 H_d diag(signs), which spreads outliers over all dims.

Rotated coordinates of any vector are nearly normal, so that one codebook fits them all
(https://arxiv.org/abs/2404.00456, https://arxiv.org/abs/2504.19874).
"""

import numpy as np
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.turboquant.fwht import fwht_p

# mlx-native's sign bits for 512 dims, its table for 256 is the first half. Bit i of the
# string is bit i % 8, the lowest first, of byte i // 8; a one is a minus.
SIGN_BITS = bytes.fromhex(
    "a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb"
    "d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85"
)


@check_arguments
def rotate(
    x: Float[Array, "... d"], signs: Int[Array | np.ndarray, " d"] | None = None
) -> Float[Array, "... d"]:
    """Rotates vectors: Rx, with R = d^-1/2 H_d diag(signs).

    R is orthogonal: norms and inner products stay, <Rq, Rk> = <q, k>. Attention over
    rotated keys and values therefore needs only its query rotated and its result
    rotated back. Sums in float32, one rounding.

    Source: https://arxiv.org/abs/2404.00456, https://arxiv.org/abs/2504.19874.

    Args:
      x: `[..., d]`, any float dtype, d a power of two.
      signs: `[d]` int, of 1 and -1; `rotation_signs(d)` unless given.

    Returns:
      `[..., d]`, dtype of x.

    Raises:
      TypeError: d is no power of two, or not the size of signs.
      ValueError: there is no sign table for d.

    Example:
      >>> q, k = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1.0, 0.0, 1.0, 0.0])
      >>> jaxkern.rotate(q) @ jaxkern.rotate(k)  # as q @ k
      Array(4., dtype=float32)
    """
    signs = rotation_signs(x.shape[-1]) if signs is None else signs
    return fwht_p(x, signs, None, scale="orthonormal")


@check_arguments
def unrotate(
    x: Float[Array, "... d"], signs: Int[Array | np.ndarray, " d"] | None = None
) -> Float[Array, "... d"]:
    """The inverse of `rotate`, which is its transpose: diag(signs) d^-1/2 H_d x.

    Args:
      x: `[..., d]`, any float dtype, d a power of two.
      signs: `[d]` int, those of the rotation; `rotation_signs(d)` unless given.

    Returns:
      `[..., d]`, dtype of x.

    Raises:
      TypeError: d is no power of two, or not the size of signs.
      ValueError: there is no sign table for d.

    Example:
      >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> jaxkern.unrotate(jaxkern.rotate(x))
      Array([1., 2., 3., 4.], dtype=float32)
    """
    signs = rotation_signs(x.shape[-1]) if signs is None else signs
    return fwht_p(x, None, signs, scale="orthonormal")


@check_arguments
def rotation_signs(d: int, seed: int | None = None) -> np.ndarray:
    """The diagonal of a rotation: d times 1 or -1, the same on every machine.

    Args:
      d: number of dims.
      seed: draws the signs from NumPy's Philox generator with this key. Without it they
        are the first d of mlx-native's table of 512.

    Returns:
      `[d]` int8, a NumPy constant.

    Raises:
      ValueError: more than 512 dims without a seed.

    Example:
      >>> jaxkern.rotation_signs(8, seed=0)
      array([-1, -1,  1, -1, -1,  1,  1, -1], dtype=int8)
    """
    if seed is None:
        if d > 8 * len(SIGN_BITS):
            raise ValueError(
                f"rotation_signs: the fixed table has {8 * len(SIGN_BITS)} signs, not "
                f"{d}. Pass a seed."
            )
        bits = np.frombuffer(SIGN_BITS, np.uint8)
    else:
        bits = np.random.Philox(key=seed).random_raw(-(-d // 64)).astype("<u8")
        bits = bits.view(np.uint8)
    return 1 - 2 * np.unpackbits(bits, count=d, bitorder="little").astype(np.int8)
