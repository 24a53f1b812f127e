"""What a model keeps its keys and values in: a float dtype, or codes of a few bits.

    cache = new_cache(config, batch, slots, "int8")
    cache = new_cache(config, batch, slots, TurboQuantCodec(4, seed=1))

| name | form |
|---|---|
| f32, f16, bf16 | floats |
| int8 | whole numbers of 8 bits, a scale for each vector |
| int2 ... int7 | the same of fewer bits, a scale for every 32 dims |
| float8 | e4m3fn, a scale for each vector |
| turboquant1 ... turboquant8, turboquant2.25 | `TurboQuantCodec` of so many bits |

Layers whose keys and values grow with the text take any of them. Latents are floats,
recurrent states float32. Attention reads the codes also of the tokens that a call
brings: how a text is cut into calls changes no code.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern import Float8Codec, IntCodec, QuantizedVectors, TurboQuantCodec
from jaxkern.models.architecture import Cache, CacheForm, ModelConfig, page_of
from jaxkern.primitives.turboquant.vector_codec import VectorCodec

TURBOQUANT_BITS = (8, 7, 6, 5, 4, 3, 2.25, 2, 1)
FORMS: Mapping[str, CacheForm] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "int8": IntCodec(8),
    **{f"int{bits}": IntCodec(bits, group=32) for bits in range(7, 1, -1)},
    "float8": Float8Codec(),
    **{f"turboquant{bits}": TurboQuantCodec(bits) for bits in TURBOQUANT_BITS},
}


def cache_form(kind: CacheForm) -> CacheForm:
    """The dtype or codec that a name of the table stands for, or that it is itself.

    Raises:
      ValueError: it is no name, no codec and not one of the three float dtypes.
    """
    if isinstance(kind, VectorCodec):
        return kind
    if isinstance(kind, str) and kind in FORMS:
        return FORMS[kind]
    name = dtype_name(kind)
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"cache: must be one of {', '.join(FORMS)}, got {kind!r}.")
    return name


def dtype_name(kind: Any) -> str | None:
    """That of what NumPy takes for a dtype."""
    try:
        return jnp.dtype(kind).name
    except TypeError:
        return None


def usual_form(config: ModelConfig) -> str:
    """The activations' dtype on a GPU, whose kernels of attention read it so."""
    return config.dtype if jax.default_backend() == "gpu" else "float32"


def new_cache(
    config: ModelConfig, batch: int, slots: int, kind: CacheForm | None = None
) -> Cache:
    """An empty cache of a model, for `prefill` and `decode`.

    Args:
      config: of `jaxkern.models.load`.
      batch: sequences at a time.
      slots: tokens of each.
      kind: see `cache_form`; default float32, on a GPU the activations' dtype.

    Raises:
      ValueError: there is no such kind, or no layer of the model can keep it.
      TypeError: a codec that does not fit the dims of a head.

    Example:
      >>> from jaxkern.models.llama import LlamaConfig
      >>> sizes = dict(layers=1, d_model=32, heads=2, kv_heads=1, head_dim=16)
      >>> turn = dict(rotary_dim=16, theta=1e4, pairing="neox", eps=1e-5)
      >>> more = dict(architecture="llama", context=8, vocabulary=9)
      >>> new_cache(LlamaConfig(**sizes, **turn, **more), 1, 8, "int4")[0].keys
      QuantizedVectors(IntCodec(bits=4, group=32), shape=(1, 8, 1, 16))
    """
    page = page_of(config)
    if kind is None:
        return page.empty_cache(config, batch, slots, usual_form(config))
    form = cache_form(kind)
    cache = page.empty_cache(config, batch, slots, form)
    if form not in forms_of(cache):
        raise ValueError(
            f"cache: no layer of this {config.architecture} keeps keys and values, "
            f"which {kind} is for: its states are float32."
        )
    return cache


def forms_of(cache: Cache) -> set[CacheForm]:
    """The codecs and dtypes in a cache."""
    leaves = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, QuantizedVectors))
    return {
        x.codec if isinstance(x, QuantizedVectors) else x.dtype.name for x in leaves
    }


def cache_bytes(cache: Cache) -> int:
    """Of arrays or of their shapes, scales included."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
