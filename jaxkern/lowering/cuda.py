"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference.

Plain elementwise ops (swiglu, geglu, whole rotations) have no row: XLA's own fusion
reaches 94 to 99 % of the memory bandwidth there, see docs/performance.md.
"""

import functools

from jaxkern.lowering.lower import lower
from jaxkern.pallas.attention import decode_attention as hopper_decode
from jaxkern.pallas.attention import flash_attention as hopper_attention
from jaxkern.pallas.attention import flash_attention_bwd as hopper_attention_bwd
from jaxkern.pallas.attention import joint_bwd as hopper_joint_bwd
from jaxkern.pallas.norm import rms_norm_bwd as hopper_rms_norm_bwd
from jaxkern.pallas.rows import cross_entropy as hopper_cross_entropy
from jaxkern.pallas.rows import softmax as hopper_softmax
from jaxkern.pallas.sampling import sample as hopper_sample
from jaxkern.primitives.activation.softmax import softcap_softmax_p, softmax_p
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.latent_attention import latent_attention_p
from jaxkern.primitives.attention.paged_attention import paged_attention_p
from jaxkern.primitives.attention.quantized_cache_attention import (
    quantized_cache_attention_p,
)
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p
from jaxkern.primitives.delta_rule.cumsum import cumsum_p
from jaxkern.primitives.index.argmax import argmax_p
from jaxkern.primitives.index.argsort import argsort_p
from jaxkern.primitives.index.embedding import embedding_p
from jaxkern.primitives.index.top_k import top_k_p
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import (
    qk_norm_rope_cache_p,
    qk_norm_rope_quantized_cache_p,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_paged_cache import (
    qk_norm_rope_paged_cache_p,
)
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import (
    update_quantized_kv_cache_p,
)
from jaxkern.primitives.linear.linear import linear_p
from jaxkern.primitives.loss.cross_entropy import (
    cross_entropy_p,
    weighted_cross_entropy_p,
)
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy_p
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.gated_rms_norm import gated_rms_norm_p
from jaxkern.primitives.norm.group_norm import group_norm_p
from jaxkern.primitives.norm.l2_norm import l2_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.moe_rms_norm_add import moe_rms_norm_add_p
from jaxkern.primitives.norm.multi_rms_norm import dual_rms_norm_p, triple_rms_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.norm.rms_norm_add import rms_norm_add_p
from jaxkern.primitives.norm.rms_norm_mul import rms_norm_mul_p
from jaxkern.primitives.norm.rms_norm_quantized import (
    add_rms_norm_quantized_p,
    rms_norm_quantized_p,
)
from jaxkern.primitives.norm.sandwich_rms_norm import (
    sandwich_rms_norm_p,
    sandwich_triple_rms_norm_p,
)
from jaxkern.primitives.optim.adamw import adamw_tree_p
from jaxkern.primitives.quant.fused_products import (
    dense_matmul_add_p,
    dense_rms_norm_matmul_p,
    dense_swiglu_p,
    interleaved_matmul_add_p,
    interleaved_rms_norm_matmul_p,
    interleaved_swiglu_p,
)
from jaxkern.primitives.quant.interleaved_matmul import interleaved_matmul_p
from jaxkern.primitives.rope.head_norm_rope import head_norm_rope_p
from jaxkern.primitives.rope.qk_norm_rope import qk_norm_rope_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.primitives.sampling.sample import sample_p
from jaxkern.primitives.turboquant.fwht import fwht_p
from jaxkern.primitives.turboquant.quantize_vectors import (
    dequantize_vectors_p,
    quantize_vectors_p,
)
from jaxkern.triton.activation import softmax
from jaxkern.triton.attention import (
    decode_attention,
    decode_quantized,
    flash_attention,
    latent_attention,
)
from jaxkern.triton.delta_rule import causal_conv1d, cumsum
from jaxkern.triton.index import argmax, argsort, embedding, top_k
from jaxkern.triton.kv_cache import qk_norm_rope_cache
from jaxkern.triton.linear import linear
from jaxkern.triton.loss import cross_entropy, linear_cross_entropy
from jaxkern.triton.norm import (
    gated_rms_norm,
    group_norm,
    l2_norm,
    layer_norm,
    moe_rms_norm_add,
    moe_rms_norm_add_backward,
    multi_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_quantized,
    sandwich_rms_norm,
)
from jaxkern.triton.optim import adamw
from jaxkern.triton.quant import packed_products
from jaxkern.triton.rope import (
    apply_rope,
    head_norm_rope,
    qk_norm_rope,
    qk_norm_rope_bwd,
)
from jaxkern.triton.sampling import sample
from jaxkern.triton.triton_call import unsupported
from jaxkern.triton.turboquant import dequantize_vectors, fwht, quantize_vectors

row = functools.partial(lower, platform="cuda", backend="triton")

row(
    rms_norm_p,
    backend="mosaic_gpu",
    fwd=None,
    bwd=hopper_rms_norm_bwd.rms_norm_bwd,
    unless=hopper_rms_norm_bwd.unsupported,
)
row(
    rms_norm_p,
    fwd=rms_norm.rms_norm_fwd,
    bwd=rms_norm.rms_norm_bwd,
    primal=rms_norm.rms_norm,
    unless=unsupported,
)
row(
    add_rms_norm_p,
    fwd=rms_norm.add_rms_norm_fwd,
    bwd=rms_norm.add_rms_norm_bwd,
    unless=unsupported,
)
row(
    layer_norm_p,
    fwd=layer_norm.layer_norm_fwd,
    bwd=layer_norm.layer_norm_bwd,
    unless=unsupported,
)
row(
    softmax_p,
    backend="mosaic_gpu",
    fwd=hopper_softmax.softmax_fwd,
    bwd=hopper_softmax.softmax_bwd,
    unless=hopper_softmax.unsupported,
    slower=hopper_softmax.slower,
)
row(
    softmax_p,
    fwd=softmax.softmax_fwd,
    bwd=softmax.softmax_bwd,
    unless=unsupported,
    slower=softmax.slower,
)
row(
    softcap_softmax_p,
    fwd=softmax.softmax_fwd,
    bwd=softmax.softcap_softmax_bwd,
    unless=unsupported,
)
row(
    apply_rope_p,
    fwd=apply_rope.apply_rope_fwd,
    bwd=apply_rope.apply_rope_bwd,
    unless=apply_rope.unsupported,
)
row(
    l2_norm_p,
    fwd=l2_norm.l2_norm_fwd,
    bwd=l2_norm.l2_norm_bwd,
    unless=unsupported,
    slower=l2_norm.slower,
)
row(
    group_norm_p,
    fwd=group_norm.group_norm_fwd,
    bwd=group_norm.group_norm_bwd,
    unless=unsupported,
    slower=group_norm.slower,
)
row(
    cross_entropy_p,
    fwd=cross_entropy.cross_entropy_fwd,
    bwd=cross_entropy.cross_entropy_bwd,
    unless=cross_entropy.unsupported,
    slower=cross_entropy.slower,
)
row(
    weighted_cross_entropy_p,
    backend="mosaic_gpu",
    fwd=hopper_cross_entropy.weighted_cross_entropy_fwd,
    inference=False,  # which writes no gradient: that is Triton's
    unless=hopper_cross_entropy.unsupported,
    slower=hopper_cross_entropy.slower,
)
row(
    weighted_cross_entropy_p,
    fwd=cross_entropy.weighted_cross_entropy_fwd,
    primal=cross_entropy.weighted_cross_entropy,
    unless=cross_entropy.unsupported,
    slower=cross_entropy.slower,
)
row(
    linear_cross_entropy_p,
    fwd=linear_cross_entropy.linear_cross_entropy_fwd,
    bwd=linear_cross_entropy.linear_cross_entropy_bwd,
    unless=linear_cross_entropy.unsupported,
)
row(embedding_p, fwd=None, bwd=embedding.embedding_bwd, unless=embedding.unsupported)
row(adamw_tree_p, fwd=adamw.adamw_tree, unless=adamw.unsupported)
row(
    gated_rms_norm_p,
    fwd=gated_rms_norm.gated_rms_norm_fwd,
    bwd=gated_rms_norm.gated_rms_norm_bwd,
    unless=unsupported,
)
row(
    rms_norm_mul_p,
    fwd=gated_rms_norm.rms_norm_mul_fwd,
    bwd=gated_rms_norm.rms_norm_mul_bwd,
    unless=unsupported,
)
row(
    rms_norm_add_p,
    fwd=rms_norm_add.rms_norm_add_fwd,
    bwd=rms_norm_add.rms_norm_add_bwd,
    unless=unsupported,
    slower=rms_norm_add.slower,
)
row(
    dual_rms_norm_p,
    fwd=multi_rms_norm.multi_rms_norm_fwd,
    bwd=multi_rms_norm.dual_rms_norm_bwd,
    unless=unsupported,
)
row(
    triple_rms_norm_p,
    fwd=multi_rms_norm.multi_rms_norm_fwd,
    bwd=multi_rms_norm.triple_rms_norm_bwd,
    unless=unsupported,
)
row(
    sandwich_rms_norm_p,
    fwd=sandwich_rms_norm.sandwich_rms_norm_fwd,
    bwd=sandwich_rms_norm.sandwich_rms_norm_bwd,
    unless=unsupported,
)
row(
    sandwich_triple_rms_norm_p,
    fwd=sandwich_rms_norm.sandwich_rms_norm_fwd,
    bwd=sandwich_rms_norm.sandwich_triple_rms_norm_bwd,
    unless=unsupported,
)
row(
    moe_rms_norm_add_p,
    fwd=moe_rms_norm_add.moe_rms_norm_add_fwd,
    bwd=moe_rms_norm_add_backward.moe_rms_norm_add_bwd,
    unless=moe_rms_norm_add.unsupported,
    slower=moe_rms_norm_add.slower,
)
row(
    rms_norm_quantized_p,
    fwd=rms_norm_quantized.rms_norm_quantized_fwd,
    unless=rms_norm_quantized.unsupported,
)
row(
    add_rms_norm_quantized_p,
    fwd=rms_norm_quantized.add_rms_norm_quantized_fwd,
    unless=rms_norm_quantized.unsupported,
)
row(
    head_norm_rope_p,
    fwd=head_norm_rope.head_norm_rope_fwd,
    bwd=head_norm_rope.head_norm_rope_bwd,
    unless=qk_norm_rope.unsupported,
)
row(
    qk_norm_rope_p,
    fwd=qk_norm_rope.qk_norm_rope_fwd,
    bwd=qk_norm_rope_bwd.qk_norm_rope_bwd,
    unless=qk_norm_rope.unsupported,
)
row(argmax_p, fwd=argmax.argmax, unless=argmax.unsupported, slower=argmax.slower)
row(top_k_p, fwd=top_k.top_k, unless=top_k.unsupported)
row(
    argsort_p,
    fwd=argsort.argsort,
    unless=argsort.unsupported,
    slower=argsort.slower,
)
row(
    sample_p,
    backend="mosaic_gpu",
    fwd=hopper_sample.sample,
    unless=hopper_sample.unsupported,
    slower=hopper_sample.slower,
)
row(sample_p, fwd=sample.sample, unless=sample.unsupported)
row(fwht_p, fwd=fwht.fwht_fwd, bwd=fwht.fwht_bwd, unless=fwht.unsupported)
row(cumsum_p, fwd=cumsum.cumsum_fwd, bwd=cumsum.cumsum_bwd, unless=cumsum.unsupported)
row(
    quantize_vectors_p,
    fwd=quantize_vectors.quantize_vectors_fwd,
    unless=quantize_vectors.unsupported,
)
row(
    dequantize_vectors_p,
    fwd=dequantize_vectors.dequantize_vectors_fwd,
    unless=dequantize_vectors.unsupported,
)
row(
    update_quantized_kv_cache_p,
    fwd=quantize_vectors.update_quantized_kv_cache_fwd,
    unless=quantize_vectors.unsupported_in_cache,
)
row(
    qk_norm_rope_cache_p,
    fwd=qk_norm_rope_cache.qk_norm_rope_cache,
    unless=qk_norm_rope_cache.unsupported,
)
row(
    qk_norm_rope_quantized_cache_p,
    fwd=qk_norm_rope_cache.qk_norm_rope_quantized_cache,
    unless=qk_norm_rope_cache.unsupported,
)
row(
    qk_norm_rope_paged_cache_p,
    fwd=qk_norm_rope_cache.qk_norm_rope_paged_cache,
    unless=qk_norm_rope_cache.unsupported,
)
row(
    causal_conv1d_p,
    fwd=causal_conv1d.causal_conv1d_fwd,
    bwd=causal_conv1d.causal_conv1d_bwd,
    unless=causal_conv1d.unsupported,
)
row(
    attention_p,
    backend="mosaic_gpu",
    fwd=hopper_decode.attention_fwd,
    unless=hopper_decode.unsupported,
    slower=hopper_decode.slower,
)
row(
    attention_p,
    fwd=decode_attention.attention_fwd,
    unless=decode_attention.unsupported,
    slower=decode_attention.slower,
)
row(
    paged_attention_p,
    fwd=decode_attention.paged_attention_fwd,
    unless=decode_attention.unsupported_paged,
)
row(
    quantized_cache_attention_p,
    fwd=decode_quantized.quantized_cache_attention_fwd,
    unless=decode_quantized.unsupported,
)
row(
    latent_attention_p,
    fwd=latent_attention.latent_attention_fwd,
    unless=latent_attention.unsupported,
)
row(
    attention_p,
    backend="mosaic_gpu",
    fwd=hopper_attention.attention_fwd,
    unless=hopper_attention.unsupported,
    slower=hopper_attention.slower,
)
row(
    attention_p,
    backend="mosaic_gpu",
    fwd=None,
    bwd=hopper_joint_bwd.attention_bwd,
    unless=hopper_joint_bwd.unsupported_joint,
    slower=hopper_joint_bwd.slower_joint,
)
row(
    attention_p,
    backend="mosaic_gpu",
    fwd=None,
    bwd=hopper_attention_bwd.attention_bwd,
    unless=hopper_attention_bwd.unsupported_bwd,
    slower=hopper_attention_bwd.slower_bwd,
)
row(
    attention_p,
    fwd=flash_attention.attention_fwd,
    unless=flash_attention.unsupported,
    slower=flash_attention.slower,
)
row(
    attention_p,
    fwd=None,
    bwd=flash_attention.attention_bwd,
    unless=flash_attention.unsupported_bwd,
    slower=flash_attention.slower,
)
row(
    interleaved_matmul_p,
    fwd=packed_products.interleaved_matmul,
    unless=packed_products.unsupported,
)
row(
    interleaved_rms_norm_matmul_p,
    fwd=packed_products.interleaved_rms_norm_matmul,
    unless=packed_products.unsupported_norm,
)
row(
    interleaved_swiglu_p,
    fwd=packed_products.interleaved_swiglu,
    unless=packed_products.unsupported_norm,
)
row(
    interleaved_matmul_add_p,
    fwd=packed_products.interleaved_matmul_add,
    unless=packed_products.unsupported,
)
row(
    linear_p,
    fwd=linear.linear,
    unless=linear.unsupported_linear,
    slower=linear.slower_linear,
)
row(
    dense_rms_norm_matmul_p,
    fwd=linear.rms_norm_matmul,
    unless=linear.unsupported_norm,
)
row(dense_swiglu_p, fwd=linear.gated, unless=linear.unsupported_norm)
row(dense_matmul_add_p, fwd=linear.matmul_add, unless=linear.unsupported)
