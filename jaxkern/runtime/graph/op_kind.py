"""What kind of work an equation is, and whether anything may be moved past it.

The table is of primitives, not of their names: a primitive of another library that is
called "add" is unknown. Unknown primitives, callbacks and effects are barriers.
"""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxprs_in_params, primitives

from jaxkern.primitives.family import KernelPrimitive, Tangent

# A checker finds no shape in what jax's own types of these hold.
Jaxpr = JaxprEqn = Any


class OpKind(enum.Enum):
    """Kinds of equations; `reorderable` ones may be moved ahead of others."""

    MATMUL = "MatMul"
    MATMUL_ID = "MatMulId"
    NORM = "Norm"
    ROPE = "Rope"
    ELEMENTWISE = "Elementwise"
    COPY = "Copy"
    GATHER = "Gather"
    SDPA = "Sdpa"
    SOFTMAX = "Softmax"
    MOE_GATE = "MoeGate"
    OTHER = "Other"

    @property
    def reorderable(self) -> bool:
        return self not in NOT_REORDERABLE


NOT_REORDERABLE = frozenset(
    {OpKind.SDPA, OpKind.SOFTMAX, OpKind.MOE_GATE, OpKind.OTHER}
)

JAX_KINDS = {
    OpKind.MATMUL: "dot_general conv_general_dilated",
    OpKind.ELEMENTWISE: """
        abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
        ceil clamp clz complex conj convert_element_type cos cosh digamma div eq erf
        erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow
        is_finite le lgamma log log1p log2 logistic lt max min mul mulhi ne neg
        nextafter not one_minus_square or polygamma polynomial population_count pow real
        reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
        zeta""",
    OpKind.COPY: """
        bitcast_convert_type broadcast_in_dim concatenate copy dynamic_update_slice iota
        name pad reshape rev slice split squeeze stack tile transpose unstack""",
    OpKind.GATHER: "dynamic_slice gather",
    OpKind.OTHER: """
        approx_top_k argmax argmin cholesky cumlogsumexp cummax cummin cumprod cumsum
        eigh fft householder_product linear_solve lu qr random_bits random_fold_in
        random_gamma random_seed random_split reduce reduce_and reduce_max reduce_min
        reduce_or reduce_prod reduce_sum reduce_window reduce_window_max
        reduce_window_min reduce_window_sum reduce_xor rng_bit_generator scatter
        scatter_add scatter_max scatter_min scatter_mul scatter_sub
        select_and_gather_add select_and_scatter select_and_scatter_add
        sharding_constraint sort svd threefry2x32 top_k triangular_solve""",
}

JAXKERN_KINDS = {
    OpKind.MATMUL: """
        affine_matmul conv2d fp8_matmul int8_matmul int_matmul matmul_transpose_b
        microscaled_matmul quantized_matmul""",
    OpKind.MATMUL_ID: """
        affine_matmul_id grouped_matmul int_matmul_id microscaled_matmul_id
        quantized_matmul_id scaled_grouped_matmul""",
    OpKind.NORM: """
        add_rms_norm add_rms_norm_quantized batch_norm batch_norm_training
        channels_last_group_norm dual_rms_norm gated_rms_norm group_norm head_norm_rope
        l2_norm layer_norm moe_rms_norm_add qk_norm_rope rms_norm rms_norm_add
        rms_norm_mul rms_norm_quantized sandwich_rms_norm sandwich_triple_rms_norm
        triple_rms_norm""",
    OpKind.ROPE: "apply_rope",
    OpKind.ELEMENTWISE: """
        adamw adamw_tree bias_activation clipped_relu compute_g_beta dequantize
        dequantize_affine dequantize_fp8 dequantize_int dequantize_interleaved
        dequantize_microscaled
        dequantize_vectors frequency_penalty geglu gelu glu packed_swiglu quantize_gguf
        quantize_vectors sigmoid_gate softcap swiglu""",
    OpKind.COPY: """
        update_kv_cache update_paged_kv_cache update_quantized_kv_cache permute_tokens
        unpermute_tokens""",
    OpKind.GATHER: """
        affine_embedding embedding fp8_embedding gather int_embedding
        microscaled_embedding quantized_embedding take_along_axis""",
    OpKind.SDPA: """
        attention merge_partials paged_attention quantized_cache_attention""",
    OpKind.SOFTMAX: """
        cross_entropy linear_cross_entropy soft_cross_entropy softcap_softmax
        softmax""",
    OpKind.MOE_GATE: "route",
    OpKind.OTHER: """
        argmax argsort avg_pool causal_conv1d cumsum fft fwht gated_delta_rule
        gated_delta_step kept_tokens max_pool moe_weighted_reduce
        repetition_penalty sample scatter_add softmax_sample solve_unit_lower
        top_k unit_lower_inverse""",
}

# Of operators that the table above does not name; of other families Other.
FAMILY_KINDS = {
    "activation": OpKind.ELEMENTWISE,
    "attention": OpKind.SDPA,
    "norm": OpKind.NORM,
    "rope": OpKind.ROPE,
}

BODIES = "jit scan while cond remat custom_jvp_call custom_vjp_call"
# By name: the classes are not public. One that JAX renames becomes a barrier.
EFFECTS_OF_REFS = ("ReadEffect", "WriteEffect", "AccumEffect")
REF_PRIMITIVES = ("new_ref", "get", "swap", "addupdate", "freeze")


@functools.cache
def kinds_of_jax() -> dict[Primitive, OpKind]:
    found = {
        p: kind
        for kind, names in JAX_KINDS.items()
        for name in names.split()
        if (p := public_primitive(name)) is not None
    }
    # These have no public name: take them from traces of what binds them.
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows, matrices = (jax.ShapeDtypeStruct((1,) * n, jnp.float32) for n in (2, 3))
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    ragged = jax.make_jaxpr(lax.ragged_dot)(rows, matrices, sizes)
    data = jax.make_jaxpr(
        lambda key: jax.random.wrap_key_data(jax.random.key_data(key))
    )(key)
    found.update({eqn.primitive: OpKind.MATMUL_ID for eqn in ragged.jaxpr.eqns})
    found.update({eqn.primitive: OpKind.COPY for eqn in data.jaxpr.eqns})
    return found


@functools.cache
def primitives_with_bodies() -> frozenset[Primitive]:
    found = (public_primitive(name) for name in BODIES.split())
    return frozenset(p for p in found if p is not None)


def public_primitive(name: str) -> Primitive | None:
    """JAX's primitive of that name; None in a version that has none."""
    return getattr(lax, f"{name}_p", None) or getattr(primitives, f"{name}_p", None)


KIND_BY_NAME = {
    name: kind for kind, names in JAXKERN_KINDS.items() for name in names.split()
}


def kind_of_primitive(p: Primitive) -> OpKind | None:
    """The kind of a primitive without a body, None for an unknown one.

    Gradients and tangents have the kind of their operator. An operator of ours that the
    table lacks has the kind of its family; it is pure, and so never unknown.
    """
    if isinstance(p, KernelPrimitive | Tangent):
        name = p.name
        for suffix in ("_fwd", "_bwd", "_tangent"):
            name = name if name in KIND_BY_NAME else name.removesuffix(suffix)
        return KIND_BY_NAME.get(name) or kind_of_family(p)
    return kinds_of_jax().get(p)


def kind_of_family(p: KernelPrimitive | Tangent) -> OpKind:
    """By the folder of primitives/ that declares the operator."""
    op = p.op if isinstance(p, Tangent) else p
    family = op.reference.__module__.rpartition(".")[0].rpartition(".")[2]
    return FAMILY_KINDS.get(family, OpKind.OTHER)


def classify(eqn: JaxprEqn) -> tuple[OpKind, str | None]:
    """(kind, why nothing may be moved past it or None) of a jaxpr equation.

    An equation with a body has the kind that all equations of the body share, else
    Other; it is a barrier if one of them is.
    """
    if reason := foreign_effect(eqn):
        return OpKind.OTHER, reason
    if is_ref_access(eqn):
        return OpKind.COPY, None
    if eqn.primitive in primitives_with_bodies():
        parts = [
            classify(inner)
            for body in jaxprs_in_params(eqn.params)
            for inner in body.eqns
        ]
        reasons = [reason for _, reason in parts if reason]
        kinds = {kind for kind, _ in parts}
        shared = kinds.pop() if len(kinds) == 1 else OpKind.OTHER
        loops = eqn.primitive.name in ("scan", "while", "cond")
        return OpKind.OTHER if loops else shared, reasons[0] if reasons else None
    kind = kind_of_primitive(eqn.primitive)
    if kind is None:
        return OpKind.OTHER, f"unknown primitive {eqn.primitive.name}"
    return kind, None


def is_ref_access(eqn: JaxprEqn) -> bool:
    """Is it JAX's creation, read, write or end of a mutable reference?"""
    atoms = [*eqn.invars[:1], *eqn.outvars]
    return eqn.primitive.name in REF_PRIMITIVES and any(is_ref(v.aval) for v in atoms)


def is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


def foreign_effect(eqn: JaxprEqn) -> str | None:
    """The effect of an equation beyond its own references, in words."""
    for effect in eqn.effects:
        name = type(effect).__name__
        known = name in EFFECTS_OF_REFS and getattr(effect, "input", None) in eqn.invars
        if not known and not is_ref_access(eqn):
            return f"effect of {eqn.primitive.name}: {effect}"
    return None
