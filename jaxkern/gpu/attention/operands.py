"""The operands of attention's gradients by name, for the kernels of every backend."""

from typing import Any, NamedTuple


class GradientOperands(NamedTuple):
    """In the order of `attention_bwd_reference`; those that are absent are None.

    Attributes:
      query, key, value: `[b, t, n, h]`, `[b, s, k, h]`, `[b, s, k, hv]`.
      bias, mask: `[b or 1, n or 1, t or 1, s or 1]`.
      q_segment_ids, kv_segment_ids, kv_lengths, q_offset: what is visible, by row.
      sinks: `[n]`.
      out, lse, tail: what the forward pass has saved.
      dout, dlse: cotangents.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    kv_lengths: Any
    q_offset: Any
    sinks: Any
    out: Any
    lse: Any
    tail: Any
    dout: Any
    dlse: Any
