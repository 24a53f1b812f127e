"""What each op means; importing this declares every op."""

from jaxkern.primitives import (
    activation,
    attention,
    delta_rule,
    index,
    kv_cache,
    linear,
    loss,
    moe,
    norm,
    optim,
    quant,
    rope,
    sampling,
    signal,
    turboquant,
    vision,
)

__all__ = [
    "activation",
    "attention",
    "delta_rule",
    "index",
    "kv_cache",
    "linear",
    "loss",
    "moe",
    "norm",
    "optim",
    "quant",
    "rope",
    "sampling",
    "signal",
    "turboquant",
    "vision",
]
