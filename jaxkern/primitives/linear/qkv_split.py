"""The parts of a packed projection: [query | key | value] as three arrays of heads."""

from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments


@check_arguments
def qkv_split(
    qkv: Float[Array, "... d"],
    num_heads: tuple[int, int, int],
    head_dims: tuple[int, int, int],
) -> tuple[Float[Array, "... n h"], Float[Array, "... k h"], Float[Array, "... kv hv"]]:
    """Splits the result of one projection into query, key and value heads.

        qkv[...] = [n_q heads of h_q | n_k heads of h_k | n_v heads of h_v]

    XLA reads the parts where they lie; the gradient is their concatenation.

        query, key, value = qkv_split(qkv, (32, 8, 8), (128, 128, 128))  # Llama 3 8B
        query, key, value = qkv_split(qkv, (16, 16, 32), (128, 128, 128))  # Qwen3-Next

    Args:
      qkv: `[..., n_q*h_q + n_k*h_k + n_v*h_v]`, any dtype.
      num_heads: (n_q, n_k, n_v).
      head_dims: (h_q, h_k, h_v).

    Returns:
      query `[..., n_q, h_q]`, key `[..., n_k, h_k]` and value `[..., n_v, h_v]`.

    Raises:
      TypeError: the last dim of qkv is not the sum of the three.

    Example:
      >>> parts = jaxkern.qkv_split(jnp.arange(8.0), (2, 1, 1), (2, 2, 2))
      >>> [part.tolist() for part in parts]
      [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0]], [[6.0, 7.0]]]
    """
    widths = [n * h for n, h in zip(num_heads, head_dims, strict=True)]
    if qkv.ndim == 0 or qkv.shape[-1] != sum(widths):
        raise TypeError(
            f"qkv_split: the last dim of `qkv` must be {' + '.join(map(str, widths))} "
            f"= {sum(widths)} for {num_heads} heads of {head_dims}, got shape "
            f"{qkv.shape}."
        )

    def heads(start, n, h):
        return qkv[..., start : start + n * h].reshape(*qkv.shape[:-1], n, h)

    query, key, value = (
        heads(sum(widths[:i]), num_heads[i], head_dims[i]) for i in range(3)
    )
    return query, key, value
