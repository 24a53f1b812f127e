"""A mixture of experts on a GPU, in ops that read packed experts where they lie.

Few tokens, as of a decode step, have three: norm and choice; gate and up of every slot;
their weighted sum and the residual. The expert that every token passes is one slot more
where its weights are kept as the others are. Of many tokens the latter two take packed
experts, whose rows they sort. Else `feed_forward.py` has the ops in turn.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.models.branch import Branch
from jaxkern.primitives.moe.expert_slots import (
    are_alike,
    expert_hidden,
    expert_sum,
    slots_of,
)
from jaxkern.primitives.moe.moe_ffn import FEW_TOKENS
from jaxkern.primitives.moe.norm_route import norm_route_p

MOST_CHOSEN = 16  # of a token, the shared one among them
WITHOUT = ("mxfp8", "e4m3", "e5m2")  # formats that no kernel for a few tokens reads
MOST_ROWS = 256  # of an expert on average; more are multiplied with decoded weights


def by_slots(config: Any, mixture: Any, weights: Any, branch: Branch) -> bool:
    """Whether the ops here take the layer: its containers, its tokens, their dtype."""
    x = branch.x
    return (
        config.fused
        and is_plain(mixture)
        and branch.norm is not None
        and 0 < math.prod(x.shape[:-1]) <= FEW_TOKENS
        and x.dtype == jnp.bfloat16
        and (weights.up is None or are_alike(weights.gate, weights.up))
        and mixture.chosen < MOST_CHOSEN
        and all(has_kernels(w) for w in (weights.gate, weights.down))
    )


def by_groups(config: Any, mixture: Any, weights: Any, branch: Branch) -> bool:
    """Whether the last two ops take the layer for many tokens, sorted by expert."""
    x = branch.x
    tokens = math.prod(x.shape[:-1])
    return (
        config.fused
        and is_plain(mixture)
        and branch.norm is not None
        and FEW_TOKENS < tokens <= MOST_ROWS * mixture.experts // mixture.chosen
        and x.dtype == jnp.bfloat16
        and (weights.up is None or are_alike(weights.gate, weights.up))
        and all(is_multiplied_packed(w) for w in (weights.gate, weights.down))
    )


def is_plain(mixture: Any) -> bool:
    """Whether experts are gated, and read what the router reads."""
    return mixture.gated and not mixture.latent


def is_multiplied_packed(w: Any) -> bool:
    """Whether this GPU has a kernel for sorted rows and experts that are kept so."""
    if isinstance(w, jax.Array) or slots_of(w) is None:
        return False
    from jaxkern.triton.moe.grouped_slots import takes

    return takes(w)


def experts_of_groups(
    mixture: Any, weights: Any, branch: Branch, by_expert: Array, ids: Array
) -> Float[Array, "b t d"]:
    """x + experts(what the branch reads), the choice being made."""
    x = branch.x
    tokens, normal = (a.reshape(-1, a.shape[-1]) for a in (x, branch.reads))
    by_expert, ids = (a.reshape(len(tokens), -1) for a in (by_expert, ids))
    hidden = expert_hidden(
        *(normal, ids, weights.gate, weights.up, weights.gate_bias, weights.up_bias),
        **dict(alpha=mixture.alpha, limit=mixture.limit, up_offset=mixture.up_offset),
    )
    residual = tokens if branch.scale == 1.0 else None
    around = weights.down, weights.down_bias, residual
    y = expert_sum(hidden, ids, by_expert, *around).reshape(x.shape)
    return y if branch.scale == 1.0 else branch.added(y)


def has_kernels(w: Any) -> bool:
    """Whether the ops read experts of bfloat16 activations by kernels."""
    if isinstance(w, jax.Array):
        return w.dtype == jnp.bfloat16
    return slots_of(w) is not None and getattr(w, "format", "") not in WITHOUT


def joins(weights: Any) -> bool:
    """Whether the shared block is one expert more."""
    if weights.shared is None or len(weights.shared.gate_up) != 1:
        return False
    [both], down = weights.shared.gate_up, weights.shared.down
    return (
        len(down) == 1
        and are_alike(weights.gate, both)
        and are_alike(weights.down, down[0])
        and both.shape[0] == weights.gate.shape[1] * (1 if weights.up is None else 2)
    )


def experts_of_slots(
    config: Any, mixture: Any, weights: Any, branch: Branch
) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"] | None]:
    """x + experts(norm(x)) and, where the shared block is not in it, norm(x)."""
    x = branch.x
    tokens = x.reshape(-1, x.shape[-1])
    joined = joins(weights)
    opening = weights.shared_gate
    normal, by_expert, ids = norm_route_p(
        branch.reads.reshape(tokens.shape),
        branch.norm,
        weights.router,
        weights.router_bias,
        weights.correction,
        opening[0] if joined and opening is not None else None,
        eps=float(config.eps),
        shared=joined,
        k=mixture.chosen,
        score=mixture.score,
        normalize=mixture.normalize,
        num_groups=mixture.num_groups,
        top_groups=mixture.top_groups,
        group_score=mixture.group_score,
        scaling_factor=float(mixture.scaling_factor),
    )
    hidden = expert_hidden(
        *(normal, ids, weights.gate, weights.up, weights.gate_bias, weights.up_bias),
        weights.shared.gate_up[0] if joined else None,
        **dict(alpha=mixture.alpha, limit=mixture.limit, up_offset=mixture.up_offset),
    )
    y = expert_sum(
        *(hidden, ids, by_expert, weights.down, weights.down_bias),
        tokens if branch.scale == 1.0 else None,
        weights.shared.down[0] if joined else None,
    )
    y = y.reshape(x.shape)
    if branch.scale != 1.0:
        y = branch.added(y)
    apart = weights.shared is not None and not joined
    return y, normal.reshape(x.shape) if apart else None
