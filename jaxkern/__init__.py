"""jaxkern: the operators of today's models as JAX primitives with every rule."""

from jaxkern.lowering import cpu as _cpu
from jaxkern.lowering import cuda as _cuda
from jaxkern.lowering.lower import backend, explain
<<<<<<< HEAD
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm
=======
from jaxkern.primitives.attention.attention import attention
from jaxkern.primitives.kv_cache.update_kv_cache import ring_positions, update_kv_cache
>>>>>>> attn
from jaxkern.primitives.norm.rms_norm import rms_norm
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

<<<<<<< HEAD
__all__ = ["add_rms_norm", "backend", "explain", "rms_norm"]
=======
__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "YarnScaling",
    "apply_rope",
    "attention",
    "backend",
    "explain",
    "ring_positions",
    "rms_norm",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "update_kv_cache",
]
>>>>>>> attn

del _cpu, _cuda  # imported for their rows
