"""Mixtures of experts."""

from jaxkern.primitives.moe.balance_losses import load_balance_loss, router_z_loss
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.grouped_matmul import grouped_matmul
from jaxkern.primitives.moe.grouped_matmul_fp8 import grouped_matmul_fp8
from jaxkern.primitives.moe.moe_ffn import moe_ffn
from jaxkern.primitives.moe.moe_ffn_fp8 import moe_ffn_fp8
from jaxkern.primitives.moe.moe_weighted_reduce import moe_weighted_reduce
from jaxkern.primitives.moe.norm_route import norm_route_p  # noqa: F401, of models
from jaxkern.primitives.moe.permute_tokens import permute_tokens
from jaxkern.primitives.moe.route import route
from jaxkern.primitives.moe.unpermute_tokens import unpermute_tokens

__all__ = [
    "expert_order",
    "grouped_matmul",
    "grouped_matmul_fp8",
    "load_balance_loss",
    "moe_ffn",
    "moe_ffn_fp8",
    "moe_weighted_reduce",
    "permute_tokens",
    "route",
    "router_z_loss",
    "unpermute_tokens",
]
