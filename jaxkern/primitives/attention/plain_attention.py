"""Attention with what no kernel knows yet: dropout, and a cap after the bias.

`attention` binds it where one of them is asked for. A primitive of its own keeps both
from the kernels of `attention`, which would ignore them.
"""

from dataclasses import dataclass
from typing import Unpack

from jaxtyping import Array, Float, UInt32

from jaxkern.primitives.attention.attend import attend
from jaxkern.primitives.attention.by_rows import by_rows, gradients_by_rows
from jaxkern.primitives.attention.operands import (
    AttentionGradients,
    AttentionOperands,
    AttentionOptions,
)
from jaxkern.primitives.check_arguments import check_fields
from jaxkern.primitives.kernel_primitive import kernel_primitive


@dataclass(frozen=True)
class SoftcapAfterBias:
    """A `softcap` of `attention` that caps the scores with their bias, as tokamax does.

        S = cap * tanh((scale * q k^T + bias) / cap)

    A number in its place caps before the bias. Here too a bias of -inf hides a key;
    without a bias both are the same.

    Attributes:
      cap: positive.

    Example:
      >>> x, bias = jnp.ones((1, 2, 1, 4)), jnp.array([[0.0, 9.0], [9.0, 0.0]])
      >>> cap = jaxkern.SoftcapAfterBias(2.0)
      >>> _, lse = jaxkern.attention(x, x, x, bias=bias, softcap=cap, return_lse=True)
      >>> lse[0, :, 0]
      Array([2.483, 2.483], dtype=float32)
    """

    cap: float

    def __post_init__(self):
        check_fields(self)


class PlainOptions(AttentionOptions):
    softcap_after_bias: bool
    dropout: float


def plain_attention_reference(
    o: AttentionOperands,
    dropout_seeds: UInt32[Array, "b k*g 2"] | None,
    **options: Unpack[PlainOptions],
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    return by_rows(attend, **o._asdict(), dropout_seeds=dropout_seeds, **options)


def plain_attention_bwd_reference(
    o: AttentionOperands,
    dropout_seeds: UInt32[Array, "b k*g 2"] | None,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    **options: Unpack[PlainOptions],
) -> AttentionGradients:
    del out  # a kernel would need it
    given = o._asdict() | dict(dropout_seeds=dropout_seeds)
    return gradients_by_rows(**given, lse=lse, dout=dout, dlse=dlse, **options)


plain_attention_p = kernel_primitive(
    plain_attention_reference,
    bwd=plain_attention_bwd_reference,
    # as in attention; and a weight is dropped by where its rows stand in t and s
    replicated=("t", "s", "h", "hv"),
)
