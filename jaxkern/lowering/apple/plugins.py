"""What the PJRT plugins for Apple GPUs accept: their operations, dtypes and targets.

The tables of jax-mps and jax-metal were read out of their released libraries, that of
metaljax out of its pure Python engine; each stands with the version it was read from.
Of jax-graft, which is the XLA compiler, no table is known: what is portable among the
others is reported for it.
"""

from dataclasses import dataclass

PLATFORMS = ("mps", "metal", "mtl", "METAL")  # names are compared as they are written

# What all of them accept, as names of StableHLO.
PORTABLE = frozenset(
    """
    abs add and atan2 bitcast_convert broadcast_in_dim case ceil clamp compare
    concatenate constant convert convolution cosine divide dot_general dynamic_slice
    dynamic_update_slice exponential exponential_minus_one floor gather iota is_finite
    log log_plus_one maximum minimum multiply negate not optimization_barrier or pad
    power reduce reduce_window remainder reshape return reverse rng_bit_generator
    round_nearest_afz round_nearest_even rsqrt scatter select select_and_scatter
    shift_left shift_right_arithmetic shift_right_logical sign sine slice sort sqrt
    subtract tan tanh transpose while xor
    """.split()
)
LIVING = frozenset(  # what jax-mps and metaljax accept beside it
    """
    after_all all_reduce cbrt cholesky complex count_leading_zeros create_token fft imag
    logistic partition_id popcnt real reduce_precision triangular_solve
    """.split()
)
COLLECTIVES = frozenset(
    """
    all_gather all_to_all collective_broadcast collective_permute reduce_scatter
    replica_id
    """.split()
)
DTYPES = frozenset("i1 i8 i16 i32 i64 ui8 ui16 ui32 ui64 f16 bf16 f32".split())
SMALL_DTYPES = frozenset(
    """
    i4 ui4 i2 ui2 f8E4M3FN f8E5M2 f8E4M3 f8E3M4 f8E8M0FNU f4E2M1FN f8E4M3B11FNUZ
    f8E4M3FNUZ f8E5M2FNUZ
    """.split()
)
FUSED_TARGETS = frozenset(
    f"mps.{name}"
    for name in """
    sdpa sdpa_causal sdpa_bwd sdpa_causal_bwd rms_norm rms_norm_bwd layer_norm
    layer_norm_bwd rope rope_bwd gelu gelu_bwd quantize dequantize quantized_matmul
    threefry2x32 addmm softmax eigh qr svd
    """.split()
)
UNARY = "sinh cosh tan asin acos atan asinh acosh atanh erf erf_inv".split()


@dataclass(frozen=True)
class Plugin:
    """One plugin.

    Attributes:
      platform: the name under which it registers.
      version: distribution and version from which the table was read.
      operations: of StableHLO, without the dialect.
      dtypes: element types, as MLIR writes them.
      composites: composites that it computes itself; it inlines every other one.
      targets: of custom calls.
      traps: names of the rules in `findings.py` for what it computes wrongly or in
        part.
      has_table: False if what stands here is only the portable part.
    """

    platform: str
    version: str
    operations: frozenset[str]
    dtypes: frozenset[str]
    composites: frozenset[str]
    targets: frozenset[str]
    traps: tuple[str, ...]
    has_table: bool = True


PLUGINS = {
    plugin.platform: plugin
    for plugin in (
        Plugin(
            "mps",
            "jax-mps 0.11.1",
            PORTABLE | LIVING,
            DTYPES | {"complex<f32>"},
            frozenset(f"chlo.{name}" for name in [*UNARY, "atan2", "top_k"]),
            FUSED_TARGETS
            | {f"mhlo.{name}" for name in [*UNARY, "topk"]}
            | {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"},
            (
                "scatter_of_one",
                "scatter_inside",
                "sort_by_one_key",
                "plain_reduce",
                "plain_reduce_window",
                "exact_integer_dot",
                "dot_keeps_dtype",
            ),
        ),
        Plugin(
            "metal",
            "metaljax 0.11.3",
            PORTABLE | LIVING | COLLECTIVES | {"dot", "if"},
            DTYPES | SMALL_DTYPES | {"complex<f32>"},
            frozenset(
                f"chlo.{n}" for n in ("erf", "erf_inv", "erfc", "square", "top_k")
            ),
            frozenset(
                {
                    "Sharding",
                    "annotate_device_placement",
                    "shape_assertion",
                    "ApproxTopK",
                    "metaljax_callback",
                }
            ),
            (),
        ),
        Plugin(
            "mtl",
            "jax-graft, no table known",
            PORTABLE | LIVING | COLLECTIVES,
            DTYPES | {"complex<f32>"},
            frozenset(f"chlo.{name}" for name in [*UNARY, "erfc", "top_k"]),
            frozenset({"Sharding"}),
            (),
            has_table=False,
        ),
        Plugin(
            "METAL",
            "jax-metal 0.1.1",
            PORTABLE | {"all_reduce", "dot", "if"},
            DTYPES,
            frozenset(
                f"chlo.{name}"
                for name in [*UNARY, "erfc", "square", "top_k", "next_after", "is_inf"]
            ),
            frozenset({"Sharding", "lapack_sgetrf", "mhlo.topk", "mhlo.erf"}),
            (
                "scatter_of_one",
                "sort_by_one_key",
                "plain_reduce",
                "max_pool_only",
                "one_contracted_dim",
                "last_index_dim",
            ),
        ),
    )
}
