"""Experts in 8-bit floats, rows with a scale each, for a few tokens, by moe_ffn.py."""

from jaxkern.triton.moe import moe_ffn
from jaxkern.triton.moe.few_slots import refusal


def refusal_of_rows(x, ids, codes, shared, format, **more) -> str | None:
    """Why no kernel runs, or None."""
    if format != "e4m3fn":
        return f"{format} has no kernel, only e4m3fn"
    return refusal(x, ids, codes=codes, shared=shared, **more)


def unsupported_hidden(
    x,
    ids,
    gate_codes,
    gate_scales,
    up_codes,
    up_scales,
    shared_codes,
    shared_scales,
    gate_bias,
    up_bias,
    *,
    format,
    **options,
) -> str | None:
    del options
    more = dict(gate_scales=gate_scales, up_codes=up_codes, up_scales=up_scales)
    more |= dict(shared_scales=shared_scales, gate_bias=gate_bias, up_bias=up_bias)
    return refusal_of_rows(x, ids, gate_codes, shared_codes, format, **more)


def unsupported_sum(
    x,
    ids,
    weights,
    down_codes,
    down_scales,
    shared_codes,
    shared_scales,
    down_bias,
    residual,
    *,
    format,
) -> str | None:
    more = dict(weights=weights, down_scales=down_scales, shared_scales=shared_scales)
    more |= dict(down_bias=down_bias, residual=residual)
    return refusal_of_rows(x, ids, down_codes, shared_codes, format, **more)


def fp8_expert_hidden(
    x,
    ids,
    gate_codes,
    gate_scales,
    up_codes,
    up_scales,
    shared_codes,
    shared_scales,
    gate_bias,
    up_bias,
    *,
    format,
    **options,
):
    """`[..., k, f]` of x `[..., d]`, ids `[..., k]` and experts `[e, 1 or 2, f, d]`."""
    del format
    return moe_ffn.hidden_of(
        *(x, ids, gate_codes, up_codes),
        **dict(gate_scales=gate_scales, up_scales=up_scales),
        **dict(shared=shared_codes, shared_scales=shared_scales),
        **dict(gate_bias=gate_bias, up_bias=up_bias),
        **options,
    )


def fp8_expert_sum(
    x,
    ids,
    weights,
    down_codes,
    down_scales,
    shared_codes,
    shared_scales,
    down_bias,
    residual,
    *,
    format,
):
    """`[..., f]` of x `[..., k, d]`, ids and weights `[..., k]`."""
    del format
    return moe_ffn.result_of(
        *(x, ids, weights, down_codes),
        **dict(scales=down_scales, shared=shared_codes, shared_scales=shared_scales),
        **dict(bias=down_bias, residual=residual),
    )
