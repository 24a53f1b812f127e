"""The norm before a mixture of experts and the choice of them: two launches.

logits    norm and product, every program some experts, by dense_products.py
choice    of a token one program chooses, another writes what is normalised
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.primitives.moe.moe_ffn import FEW_TOKENS
from jaxkern.triton.moe import route
from jaxkern.triton.moe.route import choose_experts
from jaxkern.triton.quant import dense_products

COLUMNS = 1024  # that a program normalises at a time, at most


def unsupported(
    x: Any,
    norm: Any,
    router: Any,
    router_bias: Any,
    correction_bias: Any,
    opening: Any,
    *,
    eps: float,
    shared: bool,
    **options: Any,
) -> str | None:
    """A reason in words, or None."""
    del eps, shared
    arrays = dict(norm=norm, router_bias=router_bias, opening=opening)
    arrays |= dict(x=x, router=router, correction_bias=correction_bias)
    logits = jax.ShapeDtypeStruct((*x.shape[:-1], router.shape[0]), jnp.float32)
    if reason := route.unsupported(logits=logits, **arrays, **options):
        return reason
    tokens = math.prod(x.shape[:-1])
    if tokens > FEW_TOKENS:
        return f"there are {tokens} tokens, over {FEW_TOKENS}"
    return None if x.shape[-1] else "there are no elements"


@jit
def choice_kernel(
    x_ptr,
    norm_ptr,
    logits_ptr,
    bias_ptr,
    opening_ptr,
    normal_ptr,
    weights_ptr,
    ids_ptr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Rows of weights and ids have WIDTH slots; the shared expert's is the last."""
    if AHEAD:
        begin_behind_those_ahead()
    token = tl.program_id(0)
    if tl.program_id(1) == 0:
        choose_experts(
            token + tl.arange(0, 1),
            logits_ptr,
            None,
            bias_ptr,
            weights_ptr,
            ids_ptr,
            C,
            ROWS,
            WIDTH,
            1,
        )
    else:
        column = tl.arange(0, COLUMNS)
        squares = tl.zeros([COLUMNS], tl.float32)
        for first in tl.static_range(0, D, COLUMNS):
            inside = first + column < D
            x = tl.load(x_ptr + token * D + first + column, inside, 0.0)
            x = x.to(tl.float32)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, 0) / D + EPS)
        opened = tl.zeros([COLUMNS], tl.float32)
        for first in tl.static_range(0, D, COLUMNS):
            at = first + column
            inside = at < D
            x = tl.load(x_ptr + token * D + at, inside, 0.0).to(tl.float32)
            x *= factor * tl.load(norm_ptr + at, inside, 0.0).to(tl.float32)
            to = normal_ptr + token * D + at
            tl.store(to, x.to(normal_ptr.dtype.element_ty), inside)
            if opening_ptr is not None:
                opened += x * tl.load(opening_ptr + at, inside, 0.0).to(tl.float32)
        if WIDTH > C.chosen:
            weight = 1.0
            if opening_ptr is not None:
                weight = tl.sigmoid(tl.sum(opened, 0))
            tl.store(weights_ptr + token * WIDTH + C.chosen, weight)
            tl.store(ids_ptr + token * WIDTH + C.chosen, C.experts)


def norm_route(
    x,
    norm,
    router,
    router_bias,
    correction_bias,
    opening,
    *,
    eps,
    shared,
    **options,
):
    """(normal `[..., d]`, weights and ids `[..., k]` or one slot more)."""
    *lead, d = x.shape
    e, rows, width = router.shape[0], math.prod(lead), options["k"] + shared
    whole = {"ROWS": 1, "COLUMNS": min(next_power_of_2(d), dense_products.LARGEST)}
    logits = dense_products.launch(
        x,
        router,
        norm=norm,
        bias=router_bias,
        eps=eps,
        dtype=jnp.float32,
        sizes=whole | {"num_warps": 8 if d > 2048 else 4},
    )
    return sparse_call(
        choice_kernel,
        (rows, 2),
        {
            "x_ptr": x,
            "norm_ptr": norm,
            "logits_ptr": logits,
            "bias_ptr": correction_bias,
            "opening_ptr": opening,
        },
        {
            "normal_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype),
            "weights_ptr": jax.ShapeDtypeStruct((*lead, width), jnp.float32),
            "ids_ptr": jax.ShapeDtypeStruct((*lead, width), jnp.int32),
        },
        dict(ROWS=rows, D=d, EPS=eps, WIDTH=width, C=route.choice(e, **options))
        | {"COLUMNS": min(next_power_of_2(d), COLUMNS), "num_warps": 1},
    )
