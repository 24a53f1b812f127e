"""The operands of attention by name, for the kernels of every backend."""

from typing import Any, NamedTuple


class AttentionOperands(NamedTuple):
    """In the order of `attention_reference`; those that are absent are None.

    Attributes:
      query, key, value: `[b, t, n, h]`, `[b, s, k, h]`, `[b, s, k, hv]`.
      bias, mask: `[b or 1, n or 1, t or 1, s or 1]`.
      q_segment_ids, kv_segment_ids: `[b, t]`, `[b, s]`; both or neither.
      kv_lengths, q_offset: `[b]`.
      sinks: `[n]`.
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
