"""Experts of Gemma 4, beside the dense block of a layer.

    scores  = (rms_norm(x) * scale / sqrt(d)) router
    p       = softmax(scores), of the k largest, divided by their sum
    y       = sum over these k experts e of p_e factor_e expert_e(rms_norm(x))
    expert(x) = down (gelu(gate x) * (up x))

Both blocks read x from before the dense block's norm, and have a norm behind them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import linear, moe_ffn, rms_norm, route
from jaxkern.models.architecture import Tensor
from jaxkern.models.feed_forward import Experts
from jaxkern.models.weight_reader import WeightReader


class Gemma4Experts(NamedTuple):
    """Weights of a layer's experts.

    Attributes:
      router_norm: scale / sqrt(d).
      factor: of each expert's weight.
      gate: where `up` is None the rows of both.
      norm: before them.
      dense_post_norm, post_norm: behind the dense block, behind them.
    """

    router: Float[Array, "e d"]
    router_norm: Float[Array, " d"]
    factor: Float[Array, " e"]
    gate: Experts
    up: Experts | None
    down: Experts
    norm: Float[Array, " d"]
    dense_post_norm: Float[Array, " d"]
    post_norm: Float[Array, " d"]


def beside(
    weights: Gemma4Experts,
    x: Float[Array, "b t d"],
    dense: Float[Array, "b t d"],
    *,
    chosen: int,
    eps: float,
) -> Float[Array, "b t d"]:
    """What the experts make of x, and the dense block's part, each normalised."""
    scores = rms_norm(x.astype(jnp.float32), weights.router_norm, eps=eps)
    by_expert, ids = route(linear(scores, weights.router), chosen)
    by_expert = by_expert * weights.factor[ids]
    y = moe_ffn(
        rms_norm(x, weights.norm, eps=eps),
        ids,
        by_expert.astype(x.dtype),
        weights.gate,
        weights.up,
        weights.down,
        activation="geglu_tanh",
    )
    dense = rms_norm(dense, weights.dense_post_norm, eps=eps)
    return dense + rms_norm(y, weights.post_norm, eps=eps)


def tensors_of_experts(
    d: int, experts: int, width: int, *, apart: bool
) -> dict[str, Tensor]:
    """Of a layer, by their names in GGUF files; gate and up apart or as one."""
    rows = {"gate": width, "up": width} if apart else {"gate_up": 2 * width}
    found = {
        "ffn_gate_inp.weight": (experts, d),
        "ffn_gate_inp.scale": (d,),
        "ffn_down_exps.scale": (experts,),
        "ffn_down_exps.weight": (experts, d, width),
        **{f"ffn_{name}_exps.weight": (experts, f, d) for name, f in rows.items()},
    }
    for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        found[f"{norm}.weight"] = (d,)
    return {name: Tensor(shape) for name, shape in found.items()}


def read_experts(reader: WeightReader, blk: str) -> Gemma4Experts:
    """The experts of a layer."""
    router = reader.vector(f"{blk}.ffn_gate_inp.weight")
    scale = reader.vector(f"{blk}.ffn_gate_inp.scale")
    whole = f"{blk}.ffn_gate_up_exps.weight"
    apart = not reader.has(whole)
    gate = reader.experts(f"{blk}.ffn_gate_exps.weight" if apart else whole)
    return Gemma4Experts(
        router=router,
        router_norm=scale * router.shape[1] ** -0.5,
        factor=reader.vector(f"{blk}.ffn_down_exps.scale"),
        gate=gate,
        up=reader.experts(f"{blk}.ffn_up_exps.weight") if apart else None,
        down=reader.experts(f"{blk}.ffn_down_exps.weight"),
        norm=reader.vector(f"{blk}.pre_ffw_norm_2.weight"),
        dense_post_norm=reader.vector(f"{blk}.post_ffw_norm_1.weight"),
        post_norm=reader.vector(f"{blk}.post_ffw_norm_2.weight"),
    )
