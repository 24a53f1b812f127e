"""Attention with what no kernel knows yet: dropout, and a cap after the bias.

`attention` binds it where one of them is asked for. A primitive of its own keeps both
from the kernels of `attention`, which would ignore them.
"""

from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxkern.primitives.attention.attend import attend
from jaxkern.primitives.attention.by_rows import by_rows, gradients_by_rows
from jaxkern.primitives.kernel_primitive import kernel_primitive


def plain_attention_reference(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k hv"],
    bias: Float[Array, "#b #k*g #t #s"] | None,
    mask: Bool[Array, "#b #k*g #t #s"] | None,
    q_segment_ids: Int[Array, "b t"] | None,
    kv_segment_ids: Int[Array, "b s"] | None,
    kv_lengths: Int[Array, " b"] | None,
    q_offset: Int[Array, " b"] | None,
    sinks: Float[Array, " k*g"] | None,
    dropout_seeds: UInt32[Array, "b k*g 2"] | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    softcap_after_bias: bool,
    dropout: float,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    return by_rows(
        attend,
        query,
        key,
        value,
        kv_lengths,
        q_offset,
        bias=bias,
        mask=mask,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        sinks=sinks,
        dropout_seeds=dropout_seeds,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        softcap_after_bias=softcap_after_bias,
        dropout=dropout,
    )


def plain_attention_bwd_reference(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k hv"],
    bias: Float[Array, "#b #k*g #t #s"] | None,
    mask: Bool[Array, "#b #k*g #t #s"] | None,
    q_segment_ids: Int[Array, "b t"] | None,
    kv_segment_ids: Int[Array, "b s"] | None,
    kv_lengths: Int[Array, " b"] | None,
    q_offset: Int[Array, " b"] | None,
    sinks: Float[Array, " k*g"] | None,
    dropout_seeds: UInt32[Array, "b k*g 2"] | None,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    softcap_after_bias: bool,
    dropout: float,
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "b s k h"],
    Float[Array, "b s k hv"],
    Float[Array, "#b #k*g #t #s"] | None,
    Float[Array, " k*g"] | None,
]:
    del out  # a kernel would need it
    return gradients_by_rows(
        query,
        key,
        value,
        kv_lengths,
        q_offset,
        bias=bias,
        mask=mask,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        sinks=sinks,
        dropout_seeds=dropout_seeds,
        lse=lse,
        dout=dout,
        dlse=dlse,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        softcap_after_bias=softcap_after_bias,
        dropout=dropout,
    )


plain_attention_p = kernel_primitive(
    plain_attention_reference,
    bwd=plain_attention_bwd_reference,
    # as in attention; and a weight is dropped by where its rows stand in t and s
    replicated=("t", "s", "h", "hv"),
)
