"""The scale of the scores where it is traced: a kernel's is a constant."""

import jax
from jax.core import Tracer

from jaxkern.primitives.kernel_primitive import at_least_f32


def with_static_scale(
    op: str, query: jax.Array, scale: float | jax.Array | None
) -> tuple[jax.Array, float]:
    """(query, scale): one that is traced is multiplied into the queries, 1 is left."""
    if scale is None:
        return query, max(query.shape[-1], 1) ** -0.5
    if not isinstance(scale, Tracer):
        return query, float(scale)
    if scale.shape != ():
        raise TypeError(f"{op}: `scale` must be one number, got shape {scale.shape}.")
    return (at_least_f32(query) * scale).astype(query.dtype), 1.0
