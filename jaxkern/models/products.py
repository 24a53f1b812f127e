"""Products with weights however they are kept, and what stands around them.

Every page multiplies through `project` and `gated`; which containers fuse with the norm
before, the gate between or the addition after is decided here alone.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxkern import (
    InterleavedTensor,
    embedding,
    geglu,
    linear,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
    rms_norm,
    swiglu,
)
from jaxkern.models.adapted import Adapted
from jaxkern.parallel.sum_over_devices import sum_over_devices
from jaxkern.primitives.quant.fused_products import Activation
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

Matrix = Float[Array, "d f"] | Float[Array, "f d"] | QuantizedTensor
"""A weight: quantised as in the file, an array `[f, d]` of a narrow dtype, or one of
float32 with its longer side last.

That is how XLA:CPU multiplies a single row fastest; a square one is `[d, f]`.
"""

Matrices = tuple[Matrix | Adapted, ...]
"""Weights side by side, with one input: one array, or the parts as in the file; or all
of them with adapters, which is one element."""

Table = Float[Array, "v d"] | QuantizedTensor
"""Rows to look up, as in the file."""

FP8 = "float8_e4m3fn"


class Numerics(Protocol):
    """What products read of a config."""

    @property
    def eps(self) -> float: ...  # of every norm
    @property
    def product_dtype(self) -> str | None: ...  # quantised ones round activations to
    # it; "float8_e4m3fn" is that of both operands of plain ones, and of no others
    @property
    def fused(self) -> bool: ...  # also plain weights, by ops that have GPU kernels


class JustNumerics(NamedTuple):
    """Those of a config with one of them changed."""

    eps: float
    product_dtype: str | None
    fused: bool


def project(
    config: Numerics,
    x: Float[Array, "... d"],
    matrices: Matrices,
    norm: Float[Array, " d"] | None = None,
    residual: Float[Array, "... f"] | None = None,
    bias: Float[Array, " f"] | None = None,
) -> Float[Array, "... f"]:
    """x times the matrices, the results side by side.

    `norm` normalises x before, `residual` and `bias` are added after: in the same
    kernel where the container of the weights has one.
    """
    options: dict = dict(compute_dtype=config.product_dtype)
    if isinstance(own := matrices[0], Adapted):
        x = x if norm is None else rms_norm(x, norm, eps=config.eps)
        around: dict = dict(residual=residual, bias=bias)
        return project(config, x, own.base, **around) + own.added(x)
    if bias is not None and not takes_bias(config, matrices, norm, residual):
        if residual is None:
            return plus(project(config, x, matrices, norm), bias)
        residual, bias = plus(residual, bias), None
    if norm is not None and not fuses(config, matrices):
        x, norm = rms_norm(x, norm, eps=config.eps), None

    def product(w: Any) -> Float[Array, "... f"]:
        if isinstance(w, jax.Array) and norm is None:
            across = w.dtype == jnp.float32 and w.shape[0] == x.shape[-1]
            fp8 = FP8 if config.product_dtype == FP8 else None
            return linear(x, w.T if across else w, compute_dtype=fp8)
        x_now, w_now = decoded_late(x, w)
        if norm is None:
            return quantized_matmul(x_now, w_now, **options)
        around: dict = dict(eps=config.eps, **options)
        return quantized_rms_norm_matmul(x_now, norm, w_now, bias, **around)

    if residual is not None and fuses(config, matrices) and len(matrices) == 1:
        x_now, w_now = decoded_late(x, matrices[0])
        return quantized_matmul_add(x_now, w_now, residual, bias, **options)
    ys = [product(w) for w in matrices]
    y = ys[0] if len(ys) == 1 else jnp.concatenate(ys, axis=-1)
    return y if residual is None else residual + y


def summed_over(
    axis_name: str,
    config: Numerics,
    x: Float[Array, "... d"],
    matrices: Matrices,
    residual: Float[Array, "... f"] | None = None,
) -> Float[Array, "... f"]:
    """x times the matrices, where the devices of an axis have d in parts.

    Inside `shard_map`: one all-reduce, of sums in float32 that are not rounded before,
    and of which the result has the dtype where there is no residual.
    """
    [w] = matrices
    if isinstance(w, jax.Array) and w.dtype != jnp.float32:
        part = linear(x, w, preferred_element_type=jnp.float32)
    else:
        part = project(config, x, matrices).astype(jnp.float32)
    return sum_over_devices(part, residual, axis_name=axis_name)


def gated(
    config: Numerics,
    x: Float[Array, "... d"],
    gate_up: Matrices,
    norm: Float[Array, " d"] | None = None,
    bias: Float[Array, " 2*f"] | None = None,
    activation: Activation = "silu",
    alpha: float = 1.0,
) -> Float[Array, "... f"]:
    """activation(gate) * up, the two halves of x times the matrices plus the bias.

    `norm` normalises x before; `alpha` is the steepness of the sigmoid of silu.
    """
    alone = len(gate_up) == 1 and bias is None and alpha == 1.0
    if alone and fuses(config, gate_up):
        return gated_in_one(config, x, gate_up[0], norm, None, activation)
    both = plus(project(config, x, gate_up, norm), bias)
    if len(gate_up) == 1 and activation == "silu":
        return swiglu(both, alpha=alpha)  # one gradient, as the product's is
    gate, up = jnp.split(both, 2, axis=-1)
    return swiglu(gate, up, alpha=alpha) if activation == "silu" else geglu(gate, up)


def gate_of(
    config: Numerics,
    x: Float[Array, "... d"],
    gate: Matrices,
    up: Float[Array, "... f"],
    activation: Activation,
) -> Float[Array, "... f"]:
    """activation(x times the matrices) * up."""
    if len(gate) == 1 and fuses(config, gate):
        return gated_in_one(config, x, gate[0], None, up, activation)
    y = project(config, x, gate)
    return swiglu(y, up) if activation == "silu" else geglu(y, up)


def gated_in_one(
    config: Numerics,
    x: Float[Array, "... d"],
    w: Any,
    norm: Float[Array, " d"] | None,
    up: Float[Array, "... f"] | None,
    activation: Activation,
) -> Float[Array, "... f"]:
    """`gated`, or with `up` `gate_of`, by one op."""
    return quantized_swiglu(
        *decoded_late(x, w),
        norm,
        up,
        activation=activation,
        eps=config.eps,
        compute_dtype=config.product_dtype,
    )


def fuses(config: Numerics, matrices: Matrices) -> bool:
    """Whether products with them take in what stands around them."""
    return all(
        w.dtype == jnp.bfloat16 and config.fused
        if isinstance(w, jax.Array)
        else isinstance(w, InterleavedTensor)
        for w in matrices
    )


def takes_bias(config: Numerics, matrices: Matrices, norm: Any, residual: Any) -> bool:
    """Whether the kernel of one plain matrix adds a bias to what it adds or reads."""
    plain = len(matrices) == 1 and isinstance(matrices[0], jax.Array)
    around = norm is not None or residual is not None
    return plain and around and fuses(config, matrices)


def decoded_late(x: Array, w: Any) -> tuple[Array, Any]:
    """The same, w only when x is there: XLA would hold the whole model decoded."""
    if isinstance(w, jax.Array):
        return x, w
    return lax.optimization_barrier((x, w))


def plus(
    x: Float[Array, "... f"], bias: Float[Array, " f"] | None
) -> Float[Array, "... f"]:
    """x + bias in x's dtype, or x where the model has none."""
    return x if bias is None else x + bias.astype(x.dtype)


def embed(
    tokens: Int32[Array, "..."], table: Table, dtype: DTypeLike
) -> Float[Array, "... d"]:
    """Rows of the table, decoded if they are quantised."""
    if isinstance(table, jax.Array):
        return embedding(tokens, table).astype(dtype)
    return quantized_embedding(tokens, table, dtype=dtype)


def output_product(
    config: Numerics, x: Float[Array, "... d"], output: Matrices
) -> Float[Array, "... v"]:
    """Logits in float32 of normalised hidden states."""
    plain = [w for w in output if isinstance(w, jax.Array)]
    if len(plain) == len(output) and fuses(config, output):
        wide = [linear(x, w, preferred_element_type=jnp.float32) for w in plain]
        return wide[0] if len(wide) == 1 else jnp.concatenate(wide, axis=-1)
    narrow = config.product_dtype is None and x.dtype == jnp.bfloat16
    if narrow:  # float32 of it are as exact, and cost a packed product more
        config = JustNumerics(config.eps, "bfloat16", config.fused)
    return project(config, x.astype(jnp.float32), output)
