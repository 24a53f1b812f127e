"""The ops with rows in cuda.py, imported when one is first asked for on that platform.

Triton and Mosaic take 100 MB and a second, which a machine without a GPU need not pay.
"""

from jaxkern.lowering.lower import add_rows_later
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

OPS = (
    softcap_softmax_p,
    softmax_p,
    attention_p,
    latent_attention_p,
    paged_attention_p,
    quantized_cache_attention_p,
    causal_conv1d_p,
    cumsum_p,
    argmax_p,
    argsort_p,
    embedding_p,
    top_k_p,
    update_quantized_kv_cache_p,
    qk_norm_rope_cache_p,
    qk_norm_rope_paged_cache_p,
    qk_norm_rope_quantized_cache_p,
    cross_entropy_p,
    weighted_cross_entropy_p,
    linear_cross_entropy_p,
    add_rms_norm_p,
    gated_rms_norm_p,
    group_norm_p,
    l2_norm_p,
    layer_norm_p,
    moe_rms_norm_add_p,
    dual_rms_norm_p,
    triple_rms_norm_p,
    rms_norm_p,
    rms_norm_add_p,
    rms_norm_mul_p,
    add_rms_norm_quantized_p,
    rms_norm_quantized_p,
    sandwich_rms_norm_p,
    sandwich_triple_rms_norm_p,
    adamw_tree_p,
    head_norm_rope_p,
    qk_norm_rope_p,
    apply_rope_p,
    sample_p,
    fwht_p,
    dequantize_vectors_p,
    quantize_vectors_p,
    interleaved_matmul_p,
    interleaved_rms_norm_matmul_p,
    interleaved_swiglu_p,
    interleaved_matmul_add_p,
    linear_p,
    dense_rms_norm_matmul_p,
    dense_swiglu_p,
    dense_matmul_add_p,
)

add_rows_later("cuda", "jaxkern.lowering.cuda", OPS)
