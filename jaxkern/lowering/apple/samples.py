"""A small call of every primitive, for `jaxkern apple check` and the self-test."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxkern as jk
from jaxkern.lowering.apple.declared_sample import Call, Draw, declared_sample
from jaxkern.lowering.apple.weight_samples import (
    experts_slot_by_slot,
    quantised,
)
from jaxkern.primitives.kernel_primitive import REGISTRY

part = functools.partial
OWN = "jaxkern."  # not the ops that a program declares itself


def samples(primitive: str | None = None) -> dict[str, Call]:
    """By the name of the primitive; other calls of it have a word behind a colon.

    An op that no group names is called as its annotations say, see `declared_sample`.

    Args:
      primitive: only its calls.
    """
    found: dict[str, Call] = {}
    for group in GROUPS:
        for name, call in group(Draw()).items():
            if primitive in (None, name.partition(":")[0]):
                found[name] = call
        if primitive is not None and found:
            break
    for name in REGISTRY if primitive is None else {primitive} & REGISTRY.keys():
        if name not in found and REGISTRY[name].reference.__module__.startswith(OWN):
            found[name] = declared_sample(name, Draw())
    return found


def norms(x: Draw) -> dict[str, Call]:
    rows, weight = x(2, 3, 16), x(16)
    image = x(2, 4, 3, 3)
    return {
        "rms_norm": (jk.rms_norm, (rows, weight)),
        "add_rms_norm": (jk.add_rms_norm, (rows, x(2, 3, 16), weight)),
        "gated_rms_norm": (jk.gated_rms_norm, (rows, x(2, 3, 16), weight)),
        "layer_norm": (jk.layer_norm, (rows, weight, x(16))),
        "group_norm": (part(jk.group_norm, groups=2), (image, x(4), x(4))),
        "channels_last_group_norm": (
            part(jk.group_norm, groups=2, axis=-1),
            (x(2, 3, 3, 4), x(4), x(4)),
        ),
        "l2_norm": (jk.l2_norm, (rows,)),
        "moe_rms_norm_add": (
            jk.moe_rms_norm_add,
            (x(2, 3, 16), x(2, 3), x(2, 16), weight),
        ),
        "dual_rms_norm": (jk.multi_rms_norm, (rows, weight, x(16))),
        "triple_rms_norm": (jk.multi_rms_norm, (rows, weight, x(16), x(16))),
        "rms_norm_add": (jk.rms_norm_add, (rows, x(2, 3, 16), weight)),
        "rms_norm_mul": (jk.rms_norm_mul, (rows, x(2, 3, 16), weight)),
        "rms_norm_quantized": (jk.rms_norm_quantized, (rows, weight)),
        "add_rms_norm_quantized": (
            jk.add_rms_norm_quantized,
            (rows, x(2, 3, 16), weight),
        ),
        "sandwich_rms_norm": (
            jk.sandwich_rms_norm,
            (rows, x(2, 3, 16), weight, x(16)),
        ),
        "sandwich_triple_rms_norm": (
            jk.sandwich_rms_norm,
            (rows, x(2, 3, 16), weight, x(16), x(16), x(16)),
        ),
        "batch_norm": (jk.batch_norm, (image, x(4), x(4) ** 2, x(4), x(4))),
        "batch_norm_training": (
            jk.batch_norm_training,
            (image, x(4), x(4) ** 2, x(4), x(4)),
        ),
    }


def activations(x: Draw) -> dict[str, Call]:
    a, b = x(2, 16), x(2, 16)
    return {
        "softmax": (jk.softmax, (a, b > -1)),
        "softcap_softmax": (part(jk.softmax, softcap=2.0), (a, b > -1)),
        "softcap": (part(jk.softcap, cap=3.0), (a,)),
        "gelu": (jk.gelu, (a,)),
        "gelu: none": (part(jk.gelu, approximate="none"), (a,)),
        "bias_activation": (part(jk.bias_activation, activation="silu"), (a, x(16))),
        "clipped_relu": (jk.clipped_relu, (a,)),
        "swiglu": (jk.swiglu, (a, b)),
        "packed_swiglu": (jk.swiglu, (a,)),
        "geglu": (jk.geglu, (a, b)),
        "glu": (jk.glu, (a, b)),
        "sigmoid_gate": (jk.sigmoid_gate, (a, b)),
    }


def positions_and_attention(x: Draw) -> dict[str, Call]:
    q, k, v = x(2, 3, 4, 16), x(2, 5, 2, 16), x(2, 5, 2, 16)
    new_k = x(2, 3, 2, 16)
    cos, sin = jk.rope_cos_sin(jnp.arange(3), 16)
    lengths = jnp.array([5, 3])
    table = jnp.array([[1, 2], [3, 0]])
    codec = jk.IntCodec()

    def over_codes(q: jax.Array, k: jax.Array, v: jax.Array):
        key, value = (jk.quantize_vectors(a, codec) for a in (k, v))
        return jk.quantized_cache_attention(q, key, value, kv_lengths=lengths)

    return {
        "attention": (part(jk.attention, causal=True), (q, k, v)),
        "attention: bfloat16": (
            jk.attention,
            tuple(a.astype(jnp.bfloat16) for a in (q, k, v)),
        ),
        "attention: lengths": (part(jk.attention, kv_lengths=lengths), (q, k, v)),
        "plain_attention": (
            part(jk.attention, dropout=jk.Dropout(0.5, jax.random.key(0))),
            (q, k, v),
        ),
        "paged_attention": (
            lambda q, k, v: jk.paged_attention(q, k, v, table, lengths),
            (q, x(4, 4, 2, 16), x(4, 4, 2, 16)),
        ),
        "quantized_cache_attention": (over_codes, (q, k, v)),
        "latent_attention": (
            part(jk.latent_attention, value_dim=8, scale=0.25, kv_lengths=lengths),
            (q, k[:, :, 0]),
        ),
        "indexer_scores": (
            part(jk.indexer_scores, kv_lengths=lengths, block_size=2),
            (q, k[:, :, 0], x(2, 3, 4)),
        ),
        "sparse_attention": (
            part(jk.sparse_attention, indices=table[:, None], kv_lengths=lengths),
            (q[:, :1], k, v),
        ),
        "merge_partials": (jk.merge_partials, (x(2, 3, 4), x(2, 3))),
        "apply_rope": (jk.apply_rope, (q, cos, sin)),
        "qkv_rope": (part(jk.qkv_rope, kv_heads=1), (q, cos, sin)),
        "rope_from": (part(jk.rope_from, offset=7), (q,)),
        "head_norm_rope": (jk.head_norm_rope, (q, x(16), cos, sin)),
        "qk_norm_rope": (jk.qk_norm_rope, (q, new_k, x(16), x(16), cos, sin)),
    }


def caches(x: Draw) -> dict[str, Call]:
    at, new = jnp.array([2, 6]), x(2, 3, 2, 16)
    slots = jnp.array([[4, 5, -1], [9, 10, 40]])
    codec = jk.IntCodec()

    def quantised(cache: jax.Array, new: jax.Array) -> jk.QuantizedVectors:
        codes = jk.quantize_vectors(cache, codec)
        return jk.update_quantized_kv_cache(codes, new, at)

    heads = x(2, 3, 4, 16), x(2, 3, 2, 16), x(2, 3, 2, 16), (x(16), x(16))
    tables = jk.rope_cos_sin(jnp.arange(3), 16)

    def fused(write: Callable, at: jax.Array) -> Callable:
        return lambda cache, *heads: write(*heads, tables, cache, cache, at)

    return {
        "update_kv_cache": (
            lambda cache, new: jk.update_kv_cache(cache, new, at),
            (x(2, 8, 2, 16), new),
        ),
        "update_paged_kv_cache": (
            lambda pages, new: jk.update_paged_kv_cache(pages, new, slots),
            (x(4, 4, 2, 16), new),
        ),
        "update_quantized_kv_cache": (quantised, (x(2, 8, 2, 16), new)),
        "qk_norm_rope_cache": (
            fused(jk.qk_norm_rope_cache, at),
            (x(2, 8, 2, 16), *heads),
        ),
        "qk_norm_rope_quantized_cache": (
            lambda cache, *heads: fused(jk.qk_norm_rope_quantized_cache, at)(
                jk.quantize_vectors(cache, codec), *heads
            ),
            (x(2, 8, 2, 16), *heads),
        ),
        "qk_norm_rope_cache_attention": (
            fused(jk.qk_norm_rope_cache_attention, at),
            (x(2, 8, 2, 16), *heads),
        ),
        "qk_norm_rope_paged_cache": (
            fused(jk.qk_norm_rope_paged_cache, slots),
            (x(4, 4, 2, 16), *heads),
        ),
        "quantize_vectors": (part(jk.quantize_vectors, codec=codec), (x(3, 16),)),
        "dequantize_vectors": (
            lambda a: jk.dequantize_vectors(jk.turboquant_encode(a)),
            (x(3, 16),),
        ),
        "fwht": (jk.fwht, (x(3, 16),)),
    }


def experts(x: Draw) -> dict[str, Call]:
    order = jnp.array([3, 0, 2, 1, 5, 4], jnp.int32)
    sizes = jnp.array([2, 0, 4])
    chosen = jnp.array([[1, 0], [3, 2], [0, 3]], jnp.int32)
    return {
        "permute_tokens": (part(jk.permute_tokens, order=order, k=2), (x(3, 16),)),
        "unpermute_tokens": (part(jk.unpermute_tokens, order=order, k=2), (x(6, 16),)),
        "grouped_matmul": (
            part(jk.grouped_matmul, group_sizes=sizes),
            (x(6, 16), x(3, 8, 16)),
        ),
        "scaled_grouped_matmul": (
            part(jk.grouped_matmul_fp8, group_sizes=sizes),
            (x(6, 16), x(3, 8, 16)),
        ),
        "moe_weighted_reduce": (jk.moe_weighted_reduce, (x(3, 2, 16), x(3, 2))),
        "route": (part(jk.route, k=2), (x(3, 8),)),
        "moe_ffn_few": (
            lambda a, p, *weights: jk.moe_ffn(a, chosen, p, *weights),
            (x(3, 16), x(3, 2), x(4, 8, 16), x(4, 8, 16), x(4, 16, 8)),
        ),
    }


def recurrences(x: Draw) -> dict[str, Call]:
    q, k, v = x(2, 5, 1, 8), x(2, 5, 1, 8), x(2, 5, 2, 8)
    g, beta = -(x(2, 5, 2) ** 2), jax.nn.sigmoid(x(2, 5, 2))
    g_of_channels = g[..., None] * jnp.linspace(0.0, 2.0, 8)
    first = (q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0])
    lower = jnp.tril(x(2, 6, 6) / 4, -1)
    scanned = (x(2, 5, 4), x(2, 5, 4), -(x(4, 3) ** 2), x(2, 5, 3), x(2, 5, 3))
    return {
        "causal_conv1d": (jk.causal_conv1d, (x(2, 5, 8), x(8, 4), x(8))),
        "cumsum": (jk.cumsum, (x(3, 9),)),
        "compute_g_beta": (jk.compute_g_beta, (x(3, 4), x(3, 4), x(4), x(4))),
        "gated_delta_step": (jk.gated_delta_step, (*first, x(2, 2, 8, 8))),
        "gated_delta_rule": (
            part(jk.gated_delta_rule, chunk_size=4),
            (q, k, v, g, beta),
        ),
        "gated_delta_net_inputs": (
            part(jk.gated_delta_net_inputs, key_heads=2, key_dim=8, gate_columns=16),
            (x(2, 5, 68), x(48, 4)),
        ),
        "gated_delta_net_step": (
            jk.gated_delta_net_step,
            (
                *(x(2, 32), x(2, 2, 8), x(2, 2), x(2, 2), x(32, 4), x(2), x(2), x(8)),
                *(x(2, 3, 32), x(2, 2, 8, 8), jnp.array([1, 0])),
            ),
        ),
        "gated_delta_net_verify": (
            jk.gated_delta_net_verify,
            (
                *(x(2, 3, 32), x(2, 3, 2, 8), x(2, 3, 2), x(2, 3, 2), x(32, 4), x(2)),
                *(x(2), x(8), x(2, 6, 32), x(2, 2, 8, 8), x(2, 3, 2, 8)),
                *(x(2, 3, 2, 8), -(x(2, 3, 2) ** 2), jnp.array([1, 3])),
            ),
        ),
        "kimi_delta_attention_step": (
            jk.kimi_delta_attention_step,
            (*first[:3], g_of_channels[:, 0], beta[:, 0], x(2, 2, 8, 8)),
        ),
        "kimi_delta_attention": (
            part(jk.kimi_delta_attention, chunk_size=4),
            (q, k, v, g_of_channels, beta),
        ),
        "selective_scan": (part(jk.selective_scan, delta_softplus=True), scanned),
        "state_space_dual": (
            part(jk.state_space_dual, chunk_size=4),
            (v, -g, -(x(2) ** 2), q, k),
        ),
        "unit_lower_inverse": (jk.unit_lower_inverse, (lower,)),
        "solve_unit_lower": (jk.solve_unit_lower, (lower, x(2, 6, 3))),
        "fft": (lambda a, b: jk.fft(jax.lax.complex(a, b)).real, (x(2, 8), x(2, 8))),
    }


def vision(x: Draw) -> dict[str, Call]:
    image, codes = x(2, 4, 6, 6), jnp.arange(72).reshape(2, 4, 3, 3)
    splats = (3 * x(5, 2) ** 2, jnp.array([[1.0, 0.1, 1.0]] * 5), x(5, 3), x(5) ** 2)
    return {
        "max_pool": (part(jk.max_pool, window=2), (image,)),
        "avg_pool": (part(jk.avg_pool, window=2), (image,)),
        "conv2d": (part(jk.conv2d, padding=1), (image, x(8, 4, 3, 3), x(8))),
        "int8_conv2d": (
            lambda scale, scales, bias: jk.int8_conv2d(
                (8 * image).astype(jnp.int8),
                scale,
                jnp.int32(3),
                codes.astype(jnp.int8),
                scales,
                bias=bias,
            ),
            (jnp.float32(0.1), x(2), x(2)),
        ),
        "gaussian_splat": (part(jk.gaussian_splat, height=6, width=6), splats),
    }


def selection(x: Draw) -> dict[str, Call]:
    logits, labels = x(3, 16), jnp.array([1, 7, -100])
    ids = jnp.array([1, 7, 99])
    key = jax.random.key(0)
    step = part(jk.adamw_update, step=3, learning_rate=0.1)
    return {
        "argmax": (jk.argmax, (logits,)),
        "argsort": (jk.argsort, (logits,)),
        "top_k": (part(jk.top_k, k=4), (logits,)),
        "embedding": (lambda table: jk.embedding(ids, table), (x(16, 8),)),
        "gather": (part(jk.gather, indices=ids), (x(16, 8),)),
        "scatter_add": (
            lambda a, b: jk.scatter_add(a, ids, b),
            (x(16, 8), x(3, 8)),
        ),
        "take_along_axis": (
            part(jk.take_along_axis, indices=jnp.array([[1], [3], [99]])),
            (logits,),
        ),
        "cross_entropy": (part(jk.cross_entropy, labels=labels), (logits,)),
        "weighted_cross_entropy": (
            part(jk.cross_entropy, labels=labels, reduction="mean"),
            (logits,),
        ),
        "soft_cross_entropy": (jk.cross_entropy, (logits, x(3, 16) ** 2)),
        "linear_cross_entropy": (
            part(jk.linear_cross_entropy, labels=labels),
            (x(3, 8), x(16, 8)),
        ),
        "summed_linear_cross_entropy": (
            part(jk.linear_cross_entropy, labels=labels, reduction="mean"),
            (x(3, 8), x(16, 8)),
        ),
        "sample": (
            lambda a: jk.sample(a, key, top_k=8, top_p=0.9, min_p=0.01),
            (logits,),
        ),
        "softmax_sample": (part(jk.softmax_sample, uniform=0.3), (logits,)),
        "kept_tokens": (
            part(jk.cut_logits, top_k=8, top_p=0.9, typical_p=0.9, eta=0.01),
            (logits,),
        ),
        "frequency_penalty": (
            lambda a: jk.apply_frequency_penalty(a, jnp.ones((3, 16), int), presence=1),
            (logits,),
        ),
        "repetition_penalty": (
            lambda a: jk.apply_repetition_penalty(a, jnp.array([[1, 7, -1]] * 3), 1.5),
            (logits,),
        ),
        "adamw": (
            lambda p, g, m, v: step({"w": p}, {"w": g}, {"w": m}, {"w": v}),
            (x(4), x(4), x(4), x(4) ** 2),
        ),
        "adamw_copied": (
            lambda p, g, m, v: step(
                {"w": p},
                {"w": g},
                {"w": m},
                {"w": v},
                copy={"w": p.astype(jnp.bfloat16)},
                grad_scale=0.5,
            ),
            (x(4), x(4), x(4), x(4) ** 2),
        ),
    }


GROUPS = (
    norms,
    activations,
    recurrences,
    vision,
    selection,
    experts,
    experts_slot_by_slot,
    positions_and_attention,
    caches,
    quantised,
)
