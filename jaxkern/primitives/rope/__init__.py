"""Rotary positions."""

from jaxkern.primitives.rope.axial_rope import (
    axial_rope,
    axial_rope_2d,
    axial_rope_cos_sin,
)
from jaxkern.primitives.rope.head_norm_rope import head_norm_rope
from jaxkern.primitives.rope.mrope import mrope_cos_sin
from jaxkern.primitives.rope.qk_norm_rope import qk_norm_rope
from jaxkern.primitives.rope.qkv_rope import qkv_rope
from jaxkern.primitives.rope.rope import apply_rope, rope
from jaxkern.primitives.rope.rope_frequencies import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    rope_cos_sin,
    rope_frequencies,
)
from jaxkern.primitives.rope.rope_from import rope_from

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "YarnScaling",
    "apply_rope",
    "axial_rope",
    "axial_rope_2d",
    "axial_rope_cos_sin",
    "head_norm_rope",
    "mrope_cos_sin",
    "qk_norm_rope",
    "qkv_rope",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "rope_from",
]
