"""RMSNorm of each head, then its rotation: qk_norm_rope without keys."""

from jaxkern.primitives.rope.head_norm_rope import head_norm_rope_bwd_reference
from jaxkern.triton.rope.qk_norm_rope.bwd import qk_norm_rope_gradients
from jaxkern.triton.rope.qk_norm_rope.fwd import qk_norm_rope_fwd
from jaxkern.triton.rope.qk_norm_rope.fwd import unsupported as unsupported


def head_norm_rope_fwd(x, weight, cos, sin, **options):
    y, _, rstd, _ = qk_norm_rope_fwd(x, None, weight, None, cos, sin, **options)
    return y, rstd


def head_norm_rope_bwd(
    x, weight, cos, sin, rstd, dy, *, eps, offset, pairing, pair_offset, at_end, wanted
):
    options = {"offset": offset, "pairing": pairing, "pair_offset": pair_offset}
    dx = dweight = dcos = dsin = None
    if any(wanted[:2]):
        dx, _, dweight, _ = qk_norm_rope_gradients(
            (x, None, weight, None),
            (cos, sin),
            (rstd, None),
            (dy, None),
            (wanted[0], False, wanted[1], False),
            **options,
        )
    if any(wanted[2:]):  # a learned table is rare: left to XLA
        _, _, dcos, dsin = head_norm_rope_bwd_reference(
            x, weight, cos, sin, rstd, dy, eps=eps, at_end=at_end, **options
        )
    return dx, dweight, dcos, dsin
