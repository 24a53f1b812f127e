"""Few tokens through their experts on a CPU: products read each expert in its place."""

from typing import Any

from jaxkern.cpu.cpu_call import refuses
from jaxkern.cpu.moe.grouped_matmul import multiply_experts
from jaxkern.cpu.quant.quantized_matmul_id import as_int32
from jaxkern.primitives.moe.moe_ffn import REFERENCES
from jaxkern.primitives.moe.moe_weighted_reduce import moe_weighted_reduce_reference


def unsupported(x, ids, weights, gate, up, down, *, activation: str) -> str | None:
    del activation  # XLA applies it
    if not ids.size:
        return "`ids` is empty"
    return refuses(x=x, weights=weights, gate=gate, up=up, down=down)


def moe_ffn_few(x, ids, weights, gate, up, down, *, activation: str) -> Any:
    (t, k), ids = ids.shape, as_int32(ids, gate.shape[0])
    products = (multiply_experts(x, ids, w, x.dtype) for w in (gate, up))
    hidden = REFERENCES[activation][0](*products).reshape(t * k, -1)
    slots = multiply_experts(hidden, ids.reshape(-1, 1), down, x.dtype)
    return moe_weighted_reduce_reference(
        slots.reshape(t, k, -1), weights, None, None, None
    )
