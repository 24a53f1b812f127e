"""4-bit weights of other systems as an `IntTensor`: GPTQ, AWQ, nibbles over `[d, f]`.

All of them store w = (code - zero) * scale of a `[d, f]` matrix, the transpose of ours.
No number is rounded on the way.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.int_tensor import IntTensor, pack_int, unpack_int

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of 8 that each nibble of a word holds


@check_arguments
def int4_from_gptq(
    qweight: Int32[Array, "d_words f"],
    qzeros: Int32[Array, "groups f_words"],
    scales: Float[Array, "groups f"],
    g_idx: Int32[Array, " d"] | None = None,
    *,
    version: int = 1,
) -> IntTensor:
    """A GPTQ checkpoint's linear layer of 4 bits (https://arxiv.org/abs/2210.17323).

        w[f, d] = (code - zero) * scale      of each group of inputs d

    Args:
      qweight: `[d / 8, f]`, eight inputs in a word, lowest first.
      qzeros: `[groups, f / 8]`, eight outputs in a word.
      scales: `[groups, f]`.
      g_idx: `[d]`, the group of each input (act-order), or None for runs of equal
        length. Not traced: its columns are sorted by group here.
      version: 1 stores zero - 1 modulo 16 (AutoGPTQ's format "gptq"), 2 stores zero.

    Returns:
      `[f, d]`, unsigned with zeros; with an `order` if g_idx is not sorted.

    Raises:
      TypeError: dtypes or shapes do not fit, or g_idx names a group too often.
      ValueError: an unknown version.

    Example:
      >>> qweight = jnp.full((4, 8), 0x22222222, jnp.int32)  # d = 32, f = 8
      >>> qzeros = jnp.zeros((1, 1), jnp.int32)  # zero - 1
      >>> w = jaxkern.int4_from_gptq(qweight, qzeros, jnp.full((1, 8), 0.5))
      >>> w.shape, w.codes.shape, w.scales.shape
      ((8, 32), (8, 16), (8, 1))
    """
    if version not in (1, 2):
        raise ValueError(f"int4_from_gptq: `version` must be 1 or 2, got {version}.")
    d = 8 * qweight.shape[0]
    check_import("int4_from_gptq", d, qzeros, scales, qweight.shape[1])
    codes = _nibbles(qweight.T)  # [f d]
    zeros = (_nibbles(qzeros) + (version == 1)) & 15
    group_size = -(-d // scales.shape[0])
    order = None
    if g_idx is not None:
        expected = jnp.arange(d) // group_size
        sort = jnp.argsort(g_idx, stable=True).astype(jnp.int32)
        if not jnp.array_equal(g_idx[sort], expected):
            raise TypeError(
                f"int4_from_gptq: `g_idx` must name each of {scales.shape[0]} groups "
                f"{group_size} times."
            )
        if not jnp.array_equal(g_idx, expected):
            codes, order = codes[:, sort], sort
    return _unsigned(codes, scales, zeros, group_size, order)


@check_arguments
def int4_from_awq(
    qweight: Int32[Array, "d f_words"],
    qzeros: Int32[Array, "groups f_words"],
    scales: Float[Array, "groups f"],
) -> IntTensor:
    """An AWQ checkpoint's linear layer of 4 bits (https://arxiv.org/abs/2306.00978).

        w[f, d] = (code - zero) * scale      of each group of inputs d

    The layout is AutoAWQ's "gemm".

    Args:
      qweight: `[d, f / 8]`, outputs 0 2 4 6 1 3 5 7 of eight in a word, lowest first.
      qzeros: `[groups, f / 8]`, the same order.
      scales: `[groups, f]`.

    Returns:
      `[f, d]`, unsigned with zeros.

    Raises:
      TypeError: dtypes or shapes do not fit.

    Example:
      >>> qweight = jnp.full((32, 1), 0x22222222, jnp.int32)  # d = 32, f = 8
      >>> qzeros = jnp.full((1, 1), 0x11111111, jnp.int32)
      >>> w = jaxkern.int4_from_awq(qweight, qzeros, jnp.full((1, 8), 0.5))
      >>> jaxkern.dequantize(w)[0, :4]  # (2 - 1) * 0.5
      Array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    d = qweight.shape[0]
    check_import("int4_from_awq", d, qzeros, scales, 8 * qweight.shape[1])
    place = jnp.argsort(jnp.array(AWQ_ORDER))

    def outputs(words):
        by_word = _nibbles(words).reshape(words.shape[0], -1, 8)
        return by_word[..., place].reshape(words.shape[0], -1)

    group_size = -(-d // scales.shape[0])
    return _unsigned(outputs(qweight).T, scales, outputs(qzeros), group_size, None)


@check_arguments
def int4_from_linear(
    packed: UInt8[Array, " bytes"],
    scales: Float[Array, "groups f"],
    zeros: Float[Array, "groups f"] | None = None,
    *,
    d: int,
    signed: bool = False,
    group_size: int | None = None,
) -> IntTensor:
    """Nibbles in one run over a row-major `[d, f]` matrix, the lower half first.

        w[f, d] = (code - zero) * scale      of each group of inputs d

    rlx's "symmetric" weights are unsigned with zeros = 0: pass these, None means 8.

    Args:
      packed: `[d * f / 2]`.
      scales: `[ceil(d / group_size), f]`.
      zeros: the same shape, or None for 0 (signed) or 8 (unsigned).
      d: number of inputs, even.
      signed: nibbles are two's complement.
      group_size: None for runs of equal length.

    Returns:
      `[f, d]`.

    Raises:
      TypeError: dtypes or shapes do not fit, or d is odd.

    Example:
      >>> packed = jnp.array([0x21, 0x43], jnp.uint8)  # d = 4, f = 1: codes 1, 2, 3, 4
      >>> w = jaxkern.int4_from_linear(packed, jnp.ones((1, 1)), jnp.zeros((1, 1)), d=4)
      >>> jaxkern.dequantize(w)
      Array([[1., 2., 3., 4.]], dtype=float32)
    """
    groups, f = scales.shape
    if packed.shape != (d * f // 2,) or d % 2:
        raise TypeError(
            f"int4_from_linear: `packed` must have {d * f // 2} bytes for an even "
            f"d = {d} and f = {f}, got {packed.shape}."
        )
    codes = unpack_int(packed, 4, signed).reshape(d, f).T
    return IntTensor(
        pack_int(codes, 4, signed),
        scales.T,
        None if zeros is None else zeros.T,
        bits=4,
        group_size=-(-d // groups) if group_size is None else group_size,
        signed=signed,
    )


@check_arguments
def int4_to_linear(w: IntTensor) -> UInt8[Array, " bytes"]:
    """The inverse of `int4_from_linear` for the codes of a `[f, d]` tensor.

    Args:
      w: `[f, d]` of 4 bits.

    Returns:
      `[d * f / 2]` bytes: nibbles in one run over the row-major `[d, f]` matrix, the
      lower half first.

    Raises:
      TypeError: `w` is no IntTensor.

    Example:
      >>> packed = jnp.array([0x21, 0x43], jnp.uint8)
      >>> w = jaxkern.int4_from_linear(packed, jnp.ones((1, 1)), d=4)
      >>> jaxkern.int4_to_linear(w)
      Array([33, 67], dtype=uint8)
    """
    codes = unpack_int(w.codes, 4, w.signed).T.reshape(-1)
    return pack_int(codes, 4, w.signed)


def check_import(op: str, d: int, qzeros: Array, scales: Array, f: int) -> None:
    groups = scales.shape[0]
    if scales.shape != (groups, f) or qzeros.shape != (groups, f // 8) or d % 8:
        raise TypeError(
            f"{op}: `scales` must be [groups, {f}] and `qzeros` [groups, {f // 8}], "
            f"got {scales.shape} and {qzeros.shape}."
        )


def _nibbles(words: Int32[Array, "n words"]) -> Int32[Array, "n values"]:
    """Eight numbers from each word, lowest first."""
    fields = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.int32)) & 15
    return fields.reshape(words.shape[0], 8 * words.shape[1])


def _unsigned(codes, scales, zeros, group_size: int, order) -> IntTensor:
    return IntTensor(
        pack_int(codes, 4, False),
        scales.T,
        zeros.T.astype(scales.dtype),
        order,
        bits=4,
        group_size=group_size,
        signed=False,
    )
