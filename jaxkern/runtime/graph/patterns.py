"""The chains that `Graph.fuse` knows, each with the operator that replaces it."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.primitives.activation import bias_activation, geglu, gelu, swiglu
from jaxkern.primitives.norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_mul,
    sandwich_rms_norm,
)
from jaxkern.runtime.graph.fuse import Pattern
from jaxkern.runtime.graph.op_kind import OpKind, kind_of_primitive

# The plain spelling of a norm, in three parts that are written in several ways.
SQUARES = (lambda x: x * x, jnp.square, lambda x: x**2)
MEANS = (
    lambda x: jnp.mean(x, axis=-1, keepdims=True),
    lambda x: jnp.sum(x, axis=-1, keepdims=True) / x.shape[-1],
    lambda x: jnp.mean(x, axis=-1)[..., None],
)
QUOTIENTS = (lambda x, v: x * lax.rsqrt(v), lambda x, v: x / jnp.sqrt(v))


def plain_rms_norms() -> list[Callable]:
    def spelled(square, mean, quotient):
        return lambda x, eps: quotient(x, mean(square(x)) + eps)

    return [spelled(*parts) for parts in itertools.product(SQUARES, MEANS, QUOTIENTS)]


def computed_below_float32(dtype: Any, **_: Any) -> str | None:
    if jnp.finfo(dtype).bits < 32:
        return f"the mean square is computed in {dtype}: cast x to float32 before it"
    return None


def not_of_a_matmul(x: Any, **_: Any) -> str | None:
    kinds = (OpKind.MATMUL, OpKind.MATMUL_ID)
    if x is None or kind_of_primitive(x.primitive) not in kinds:
        return "x is not the result of a matmul"
    return None


# What a norm does inside: cast to float32, cast the result back.
IN_FLOAT32 = lambda x: rms_norm(x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
IN_FLOAT32_WITH_WEIGHT = (
    lambda x, weight: rms_norm(
        x.astype(jnp.float32), weight.astype(jnp.float32)
    ).astype(x.dtype),
    lambda x, weight: rms_norm(x.astype(jnp.float32), weight).astype(x.dtype),
)


def activation_after_bias(activation: str, f: Callable) -> Pattern:
    fused = functools.partial(bias_activation, activation=activation)  # pyright: ignore[reportArgumentType]

    def chain(x, bias):
        return f(x + bias)

    return Pattern("bias_activation", chain, fused, not_of_a_matmul)


def patterns_of(name: str, *chains: Callable, fused: Callable) -> list[Pattern]:
    return [Pattern(name, chain, fused) for chain in chains]


gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
gelu_exact = functools.partial(jax.nn.gelu, approximate=False)

PATTERNS: dict[str, list[Pattern]] = {
    "rms_norm": [
        *(
            Pattern("rms_norm", chain, rms_norm, computed_below_float32)
            for chain in plain_rms_norms()
        ),
        *patterns_of(
            "rms_norm",
            IN_FLOAT32,
            lambda x, weight, offset: rms_norm(x) * (weight + offset),
            lambda x, weight: rms_norm(x) * weight,
            *IN_FLOAT32_WITH_WEIGHT,
            fused=rms_norm,
        ),
    ],
    "sandwich_rms_norm": patterns_of(
        "sandwich_rms_norm",
        lambda x, residual, weight, next_weight: (
            rms_norm(total := residual + rms_norm(x, weight), next_weight),
            total,
        ),
        fused=lambda x, residual, weight, next_weight, **options: sandwich_rms_norm(
            x, residual, weight, next_weight, **options
        ),
    ),
    "rms_norm_mul": patterns_of(
        "rms_norm_mul",
        lambda x, scale, weight: rms_norm(x, weight) * scale,
        lambda x, scale: rms_norm(x) * scale,
        fused=rms_norm_mul,
    ),
    "rms_norm_add": patterns_of(
        "rms_norm_add",
        lambda x, residual, weight: residual + rms_norm(x, weight),
        lambda x, residual: residual + rms_norm(x),
        fused=rms_norm_add,
    ),
    "add_rms_norm": patterns_of(
        "add_rms_norm",
        lambda x, residual, weight: (
            rms_norm(total := x + residual, weight),
            total,
        ),
        lambda x, residual: (rms_norm(total := x + residual), total),
        lambda x, residual, weight, bias: (
            rms_norm(total := x + residual, weight, bias),
            total,
        ),
        fused=add_rms_norm,
    ),
    "swiglu": patterns_of(
        "swiglu",
        lambda gate, up: jax.nn.silu(gate) * up,
        fused=swiglu,
    ),
    "geglu": [
        *patterns_of(
            "geglu",
            lambda gate, up: gelu(gate) * up,
            fused=geglu,
        ),
        *patterns_of(
            "geglu",
            lambda gate, up: gelu_tanh(gate) * up,
            fused=functools.partial(geglu, approximate="tanh"),
        ),
        *patterns_of(
            "geglu",
            lambda gate, up: gelu_exact(gate) * up,
            fused=functools.partial(geglu, approximate="none"),
        ),
    ],
    "bias_activation": [
        activation_after_bias("silu", jax.nn.silu),
        activation_after_bias("relu", jax.nn.relu),
        activation_after_bias("gelu_tanh", gelu_tanh),
        activation_after_bias("gelu", gelu_exact),
        activation_after_bias("sigmoid", jax.nn.sigmoid),
        activation_after_bias("tanh", jnp.tanh),
    ],
}
