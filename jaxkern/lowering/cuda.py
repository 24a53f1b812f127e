"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference.

Plain elementwise ops (swiglu, geglu, whole rotations) have no row: XLA's own fusion
reaches 94 to 99 % of the memory bandwidth there, see docs/performance.md.
"""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.paged_attention import paged_attention_p
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p
from jaxkern.primitives.delta_rule.cumsum import cumsum_p
from jaxkern.primitives.index.argmax import argmax_p
from jaxkern.primitives.index.embedding import embedding_p
from jaxkern.primitives.index.top_k import top_k_p
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import (
    update_quantized_kv_cache_p,
)
from jaxkern.primitives.loss.cross_entropy import cross_entropy_p
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
from jaxkern.primitives.rope.head_norm_rope import head_norm_rope_p
from jaxkern.primitives.rope.qk_norm_rope import qk_norm_rope_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.primitives.sampling.sample import sample_p
from jaxkern.primitives.turboquant.fwht import fwht_p
from jaxkern.primitives.turboquant.quantize_vectors import quantize_vectors_p
from jaxkern.triton.activation import softmax
from jaxkern.triton.attention import decode_attention, flash_attention
from jaxkern.triton.delta_rule import causal_conv1d, cumsum
from jaxkern.triton.index import argmax, embedding, top_k
from jaxkern.triton.loss import cross_entropy, linear_cross_entropy
from jaxkern.triton.norm import (
    gated_rms_norm,
    group_norm,
    l2_norm,
    layer_norm,
    moe_rms_norm_add,
    multi_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_quantized,
    sandwich_rms_norm,
)
from jaxkern.triton.optim import adamw
from jaxkern.triton.rope import apply_rope, head_norm_rope, qk_norm_rope
from jaxkern.triton.sampling import sample
from jaxkern.triton.triton_call import unsupported
from jaxkern.triton.turboquant import fwht, quantize_vectors

# fmt: off
ROWS = (
    # op            forward                  backward                 refuses
    (rms_norm_p,     rms_norm.rms_norm_fwd,     rms_norm.rms_norm_bwd,     unsupported),
    (add_rms_norm_p, rms_norm.add_rms_norm_fwd, rms_norm.add_rms_norm_bwd, unsupported),
    (layer_norm_p,   layer_norm.layer_norm_fwd, layer_norm.layer_norm_bwd, unsupported),
    (softmax_p,      softmax.softmax_fwd,       softmax.softmax_bwd,       unsupported),
    (apply_rope_p,   apply_rope.apply_rope_fwd, apply_rope.apply_rope_bwd, apply_rope.unsupported),
)
# Written and compiled, but not every one of their tests has passed on a GPU yet: they
# run where `backend("triton")` asks for them.
ON_REQUEST = (
    (l2_norm_p,      l2_norm.l2_norm_fwd,       l2_norm.l2_norm_bwd,       unsupported),
    (group_norm_p,
     group_norm.group_norm_fwd, group_norm.group_norm_bwd, group_norm.unsupported),
    (cross_entropy_p, cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd, cross_entropy.unsupported),
    (linear_cross_entropy_p, linear_cross_entropy.linear_cross_entropy_fwd, linear_cross_entropy.linear_cross_entropy_bwd, linear_cross_entropy.unsupported),
    (embedding_p,    None,              embedding.embedding_bwd,   embedding.unsupported),
    (adamw_tree_p,   adamw.adamw_tree,            None,                      adamw.unsupported),
    (gated_rms_norm_p,
     gated_rms_norm.gated_rms_norm_fwd, gated_rms_norm.gated_rms_norm_bwd,
     gated_rms_norm.unsupported),
    (rms_norm_mul_p,
     gated_rms_norm.rms_norm_mul_fwd, gated_rms_norm.rms_norm_mul_bwd,
     gated_rms_norm.unsupported),
    (rms_norm_add_p,
     rms_norm_add.rms_norm_add_fwd, rms_norm_add.rms_norm_add_bwd,
     sandwich_rms_norm.unsupported),
    (dual_rms_norm_p,
     multi_rms_norm.multi_rms_norm_fwd, multi_rms_norm.dual_rms_norm_bwd,
     sandwich_rms_norm.unsupported),
    (triple_rms_norm_p,
     multi_rms_norm.multi_rms_norm_fwd, multi_rms_norm.triple_rms_norm_bwd,
     sandwich_rms_norm.unsupported),
    (sandwich_rms_norm_p,
     sandwich_rms_norm.sandwich_rms_norm_fwd, sandwich_rms_norm.sandwich_rms_norm_bwd,
     sandwich_rms_norm.unsupported),
    (sandwich_triple_rms_norm_p,
     sandwich_rms_norm.sandwich_rms_norm_fwd,
     sandwich_rms_norm.sandwich_triple_rms_norm_bwd,
     sandwich_rms_norm.unsupported),
    (moe_rms_norm_add_p,
     moe_rms_norm_add.moe_rms_norm_add_fwd, moe_rms_norm_add.moe_rms_norm_add_bwd,
     moe_rms_norm_add.unsupported),
    (rms_norm_quantized_p,
     rms_norm_quantized.rms_norm_quantized_fwd, None,
     rms_norm_quantized.unsupported),
    (add_rms_norm_quantized_p,
     rms_norm_quantized.add_rms_norm_quantized_fwd, None,
     rms_norm_quantized.unsupported),
    (head_norm_rope_p,
     head_norm_rope.head_norm_rope_fwd, head_norm_rope.head_norm_rope_bwd,
     qk_norm_rope.unsupported),
    (qk_norm_rope_p,
     qk_norm_rope.qk_norm_rope_fwd, qk_norm_rope.qk_norm_rope_bwd,
     qk_norm_rope.unsupported),
    (argmax_p,       argmax.argmax,             None,                      argmax.unsupported),
    (top_k_p,        top_k.top_k,               None,                      top_k.unsupported),
    (sample_p,       sample.sample,             None,                      sample.unsupported),
    (fwht_p,         fwht.fwht_fwd,             fwht.fwht_bwd,             fwht.unsupported),
    (cumsum_p,       cumsum.cumsum_fwd,         cumsum.cumsum_bwd,         cumsum.unsupported),
    (quantize_vectors_p, quantize_vectors.quantize_vectors_fwd, None, quantize_vectors.unsupported),
    (update_quantized_kv_cache_p,
     quantize_vectors.update_quantized_kv_cache_fwd, None,
     quantize_vectors.unsupported_in_cache),
    (causal_conv1d_p,
     causal_conv1d.causal_conv1d_fwd, causal_conv1d.causal_conv1d_bwd,
     causal_conv1d.unsupported),
    # backward from the kernel's lse: the reference
    (attention_p,       decode_attention.attention_fwd,       None, decode_attention.unsupported),
    (paged_attention_p, decode_attention.paged_attention_fwd, None, decode_attention.unsupported_paged),
    (attention_p,    flash_attention.attention_fwd, flash_attention.attention_bwd, flash_attention.unsupported),
)
# fmt: on
for op, fwd, bwd, unless in ROWS:
    lower(op, "cuda", "triton", fwd=fwd, bwd=bwd, unless=unless)
for op, fwd, bwd, unless in ON_REQUEST:
    lower(
        op,
        "cuda",
        "triton",
        fwd=fwd,
        bwd=bwd,
        unless=unless,
        on_request="not every test of it has passed on a GPU yet",
    )
