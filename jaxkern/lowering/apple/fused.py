"""The fused kernels of jax-mps, MLX's own: what an op calls there, and when.

jax-mps computes custom calls named `mps.*` with the kernels of MLX. It reads their
options from JSON, and takes defaults where it cannot read it, without a word; it
promotes dtypes as MLX does, whatever type the call declares. So options are plain
finite numbers, and operands get one dtype before the call. All of them serve inference:
the forward pass of training saves what no such kernel returns.
"""

import contextlib
import contextvars
import functools
import importlib.metadata
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lowering.apple.portable import portable
from jaxkern.primitives.attention.attend import without_rest
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.mask import make_mask, padding_mask, segment_mask
from jaxkern.primitives.attention.operands import AttentionOperands

TESTED = ((0, 11, 1), (0, 11, 2))  # from, up to but without: versions of jax-mps
RIVALS = ("jax-metallib", "applejax")  # register the platform "mps" too
FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16)

assumed_version = contextvars.ContextVar[str | None]("assumed_version", default=None)


@contextlib.contextmanager
def assume_jax_mps(version: str = "0.11.1") -> Iterator[None]:
    """Lowers as if this version of jax-mps were installed; to look, not to run."""
    token = assumed_version.set(version)
    try:
        yield
    finally:
        assumed_version.reset(token)


@functools.cache
def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def jax_mps_refusal() -> str | None:
    """Why the fused kernels are not used at all, or None."""
    version = assumed_version.get()
    if version is None:
        version = installed_version("jax-mps")
        for rival in RIVALS:
            if installed_version(rival):
                return f'{rival} is installed, which registers "mps" too'
    if version is None:
        return "jax-mps is not installed"
    numbers = version.split(".")
    whole = all(n.isdigit() for n in numbers)
    if not whole or not TESTED[0] <= tuple(map(int, numbers)) < TESTED[1]:
        low, high = (".".join(map(str, v)) for v in TESTED)
        return f"jax-mps {version} is not one that was read: >={low},<{high}"
    return None


def refusal(*operands: Any, options: Any = ()) -> str | None:
    """The reasons that all fused kernels share."""
    if reason := jax_mps_refusal():
        return reason
    for x in operands:
        if x is None:
            continue
        if not all(isinstance(n, int) for n in x.shape):
            return "a size is symbolic"
        if 0 in x.shape:
            return "an operand is empty"
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype not in FLOATS:
            return f"{x.dtype} is not among its dtypes"
    if not all(math.isfinite(option) for option in options):
        return "an option is not finite, which JSON cannot say"
    return None


def call(target: str, result: Any, *operands: Any, **options: float | bool) -> Any:
    """`mps.<target>` of the operands; `result` has the shapes and dtypes."""
    config = json.dumps(options, allow_nan=False) if options else ""
    return jax.ffi.ffi_call(
        f"mps.{target}",
        result,
        custom_call_api_version=2,
        legacy_backend_config=config,
        vmap_method="sequential",  # the plugin has no rule of its own
    )(*operands)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# Norms. A weight of another dtype would change that of the result: all get one.


def rms_norm(x, weight, bias, *, eps, offset):
    dtype = jnp.result_type(*(a.dtype for a in (x, weight) if a is not None))
    if weight is None:
        weight = jnp.ones(x.shape[-1:], dtype)
    if offset or bias is not None:  # one rounding, at the end
        dtype = jnp.float32
    weight, wide = weight.astype(dtype), x.astype(dtype)
    if offset:
        weight = weight + offset
    y = call("rms_norm", like(wide), wide, weight, eps=float(eps))
    return (y if bias is None else y + bias.astype(dtype)).astype(x.dtype)


def unsupported_rms_norm(x, weight, bias, *, eps, offset):
    return refusal(x, weight, bias, options=(eps, offset))


def add_rms_norm(x, residual, weight, bias, *, eps, offset):
    total = x.astype(jnp.float32) + residual.astype(jnp.float32)
    y = rms_norm(total, weight, bias, eps=eps, offset=offset)
    return y.astype(x.dtype), total.astype(residual.dtype)


def unsupported_add_rms_norm(x, residual, weight, bias, *, eps, offset):
    return refusal(x, residual, weight, bias, options=(eps, offset))


def layer_norm(x, weight, bias, *, eps, offset=0.0):
    del offset  # 0, see below
    given = [a for a in (x, weight, bias) if a is not None]
    dtype = jnp.result_type(*(a.dtype for a in given))
    wide, d = x.astype(dtype), x.shape[-1:]
    weight = jnp.ones(d, dtype) if weight is None else weight.astype(dtype)
    bias = jnp.zeros(d, dtype) if bias is None else bias.astype(dtype)
    y = call("layer_norm", like(wide), wide, weight, bias, eps=float(eps))
    return y.astype(x.dtype)


def unsupported_layer_norm(x, weight, bias, *, eps, offset=0.0):
    if offset:  # weight + offset would be rounded to the dtype of x
        return "it adds nothing to the weight"
    return refusal(x, weight, bias, options=(eps,))


# Activations.


def gelu(x, *, approximate):
    del approximate  # tanh, see below
    return call("gelu", like(x), x)


def unsupported_gelu(x, *, approximate):
    if approximate != "tanh":
        return "it has the tanh form only"
    return refusal(x)


def softmax(x, mask, *, scale):
    z = x.astype(jnp.float32) * scale
    if mask is not None:
        z = jnp.where(mask, z, -jnp.inf)
    y = call("softmax", like(z), z, axis=z.ndim - 1)
    # MLX makes NaN of a row without anything to keep
    empty = jnp.max(z, axis=-1, keepdims=True) == -jnp.inf
    return jnp.where(empty, 0, y).astype(x.dtype)


def unsupported_softmax(x, mask, *, scale):
    return refusal(x, mask, options=(scale,))


# Rotation, with heads in front of rows.


def rope(x, offset, *, theta, rotary_dim, pairing, at_end):
    del at_end  # refused
    heads = jnp.swapaxes(x, -2, -3)
    y = call(
        "rope",
        like(heads),
        heads,
        offset.astype(jnp.int32),
        dims=rotary_dim,
        traditional=pairing == "interleaved",
        base=float(theta),
        rope_scale=1.0,
    )
    return jnp.swapaxes(y, -2, -3)


def unsupported_rope(x, offset, *, theta, rotary_dim, pairing, at_end):
    del pairing
    if rotary_dim == 0:
        return "nothing rotates"
    if at_end:
        return "it turns the first dims of a head"
    return refusal(x, offset, options=(theta,))


# Attention, with heads in front of rows.


def attention(*operands, scale, causal, window, softcap):
    o = AttentionOperands(*operands)
    options = dict(scale=scale, causal=causal, window=window, softcap=softcap)
    reference = functools.partial(attention_p.reference, **options)
    # no kernel returns it; what nobody reads is dropped from the module
    _, lse = portable(reference, "mps")(*operands)
    t, s = o.query.shape[1], o.key.shape[1]
    seen = visible(o, causal, window)
    # what is hidden still meets a weight of 0, which NaN survives
    key, value = (without_rest(x, o.kv_lengths) for x in (o.key, o.value))
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (o.query, key, value))
    plain_causal = causal and window is None and o.q_offset is None and t == s
    masks = o.mask, o.q_segment_ids, o.kv_lengths
    if plain_causal and all(x is None for x in masks):
        out = call("sdpa_causal", like(q), q, k, v, scale=float(scale))
        return jnp.swapaxes(out, 1, 2), lse
    if seen is None:
        seen = jnp.ones((1, 1, 1, 1), jnp.bool_)
    out = call("sdpa", like(q), q, k, v, seen, scale=float(scale))
    # a hidden key loses 1e9 and no more: a row without keys would see all
    out = jnp.where(jnp.any(seen, axis=-1, keepdims=True), out, 0)
    return jnp.swapaxes(out, 1, 2), lse


def visible(o: AttentionOperands, causal, window):
    """The mask `[#b #n #t #s]` of a call, or None."""
    t, s = o.query.shape[1], o.key.shape[1]
    masks = [] if o.mask is None else [o.mask]
    if causal or window is not None:
        positions = make_mask(t, s, causal=causal, window=window, q_offset=o.q_offset)
        masks.append(positions.reshape(-1, 1, t, s))
    if o.q_segment_ids is not None and o.kv_segment_ids is not None:
        segments = segment_mask(o.q_segment_ids, o.kv_segment_ids)
        masks.append(segments.reshape(-1, 1, t, s))
    if o.kv_lengths is not None:
        masks.append(padding_mask(o.kv_lengths, s))
    return functools.reduce(jnp.logical_and, masks) if masks else None


def unsupported_attention(query, key, value, bias, sinks, *, softcap, scale, **others):
    if bias is not None or sinks is not None or softcap is not None:
        return "it takes no bias, sinks or softcap"
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value differ in dtype"
    if value.shape[-1] != query.shape[-1]:
        return "the values have another width than the keys"
    arrays = [x for x in others.values() if hasattr(x, "shape")]
    return refusal(query, key, value, *arrays, options=(scale,))
