"""Experts of plain arrays for a few tokens, by moe_ffn.py."""

from jaxkern.triton.moe import moe_ffn
from jaxkern.triton.moe.few_slots import refusal


def refusal_of_arrays(x, ids, w, shared, **more) -> str | None:
    """Why no kernel runs, or None."""
    if reason := refusal(x, ids, experts=w, shared=shared, **more):
        return reason
    if any(a is not None and a.dtype != x.dtype for a in (w, shared)):
        return f"`x` is {x.dtype}, weights are {w.dtype}"
    return None


def unsupported_hidden(
    x, ids, gate_w, up_w, shared_w, gate_bias, up_bias, **options
) -> str | None:
    del options
    if up_w is not None and up_w.dtype != gate_w.dtype:
        return f"`gate` is {gate_w.dtype}, `up` is {up_w.dtype}"
    more = dict(gate_bias=gate_bias, up_bias=up_bias)
    return refusal_of_arrays(x, ids, gate_w, shared_w, **more)


def unsupported_sum(
    x, ids, weights, down_w, shared_w, down_bias, residual
) -> str | None:
    more = dict(weights=weights, down_bias=down_bias, residual=residual)
    return refusal_of_arrays(x, ids, down_w, shared_w, **more)


def dense_expert_hidden(
    x, ids, gate_w, up_w, shared_w, gate_bias, up_bias, *, alpha, limit, up_offset
):
    """`[..., k, f]` of x `[..., d]`, ids `[..., k]` and experts `[e, 1 or 2, f, d]`."""
    return moe_ffn.hidden_of(
        *(x, ids, gate_w, up_w),
        **dict(shared=shared_w, gate_bias=gate_bias, up_bias=up_bias),
        **dict(alpha=alpha, limit=limit, up_offset=up_offset),
    )


def dense_expert_sum(x, ids, weights, down_w, shared_w, down_bias, residual):
    """`[..., f]` of x `[..., k, d]`, ids and weights `[..., k]`."""
    return moe_ffn.result_of(
        *(x, ids, weights, down_w),
        **dict(shared=shared_w, bias=down_bias, residual=residual),
    )
