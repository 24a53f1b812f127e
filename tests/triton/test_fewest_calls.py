"""As few calls as run every kernel of the CUDA table, and what they must do here.

The oldest Triton that is supported makes the first stage of all: what only a newer one
takes, such as a kernel's function that returns None, is found without a GPU.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkern import (
    FP8Tensor,
    InterleavedTensor,
    attention,
    backend,
    cross_entropy,
    dequantize,
    explain,
    grouped_matmul,
    grouped_matmul_fp8,
    linear,
    moe_ffn_fp8,
    quantize_affine,
    quantize_fp8,
    quantize_int,
    quantize_microscaled,
    quantized_embedding,
    quantized_matmul,
    route,
    sample,
    softmax,
    swiglu,
    top_k,
)
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import Launch, compiled
from jaxkern.gpu.triton_call import missing
from jaxkern.lowering.cuda import KERNELS
from jaxkern.lowering.kernel_table import Kernel as KernelLine
from jaxkern.lowering.kernel_table import row_of
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.primitives.leafwise_primitive import LEAFWISE
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.triton.quant.fixed_point_codes import FORMATS, bytes_of_step
from tests.triton import test_every_kernel as every
from tests.triton.test_every_kernel import asked_for, slopes, spec

pytestmark = pytest.mark.skipif(
    missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
TINY = 500  # elements: one block, where little can go wrong

Call = list[tuple[Callable, tuple]]
Kernel = tuple[str, str]  # what `explain` says that runs, and a kernel that it launches


def attend(t: int, s: int, rows: int) -> tuple[Callable, tuple]:
    q, k = spec(rows, t, 8, 128), spec(rows, s, 2, 128)
    return functools.partial(attention, causal=True), (q, k, k)


def losses(logits):
    labels = jnp.zeros(logits.shape[:-1], jnp.int32)
    return cross_entropy(logits, labels, reduction="mean")


def experts(x, w):
    return grouped_matmul(x, w, jnp.full(8, 128, jnp.int32))


def stored_experts() -> tuple:
    scales = spec(8, 512, 1, dtype="float32")
    w = FP8Tensor(spec(8, 512, 512, dtype="uint8"), scales, (1, 0))
    return spec(1024, 512), w, jnp.full(8, 128, jnp.int32)


def stored_layer() -> tuple:
    """A prompt of 24 tokens, gate and up in one array as loaders have them."""
    ids = jnp.arange(48, dtype=jnp.int32).reshape(24, 2) % 5
    both, down = (
        FP8Tensor(spec(5, f, d, dtype="uint8"), spec(5, f, 1, dtype="float32"), (1, 0))
        for f, d in ((256, 192), (192, 128))
    )
    return spec(24, 192), ids, spec(24, 2), both, None, down


def few_stored_experts() -> tuple[Callable, tuple]:
    """One token through experts in 8 bits and the one that all pass."""
    ids = jnp.array([[4, 0, 5]], jnp.int32)  # the last is the shared one

    def layer(x, weights, both, down, of_all, back):
        gate = both, None, None, None, of_all
        hidden = expert_hidden(x, ids, *gate, alpha=1.0, limit=None, up_offset=0.0)
        return expert_sum(hidden, ids, weights, down, None, x, back)

    def stored(*shape):
        scales = spec(*shape[:-1], 1, dtype="float32")
        return FP8Tensor(spec(*shape, dtype="uint8"), scales, (1, 0))

    shapes = (5, 256, 192), (5, 192, 128), (256, 192), (192, 128)
    return layer, (spec(1, 192), spec(1, 3), *(stored(*s) for s in shapes))


def one_activation() -> tuple[Callable, tuple]:
    """Products by whole numbers, of all formats that have them."""
    weights = [
        InterleavedTensor(spec(3, 2 * bytes_of_step(q), dtype="uint8"), q)
        for q in FORMATS
    ]

    def products(x, weights):
        return [quantized_matmul(x, w) for w in weights]

    return products, (spec(1, 512), weights)


def rows_of(quantize: Callable, **options: Any) -> tuple[Callable, tuple]:
    """A packed table decoded, rows that ids name, and a product of many with it."""
    ids = jnp.array([3, 5, -1])

    def both(x, w):
        w = quantize(w, **options)
        return dequantize(w), quantized_embedding(ids, w), quantized_matmul(x, w)

    return both, (spec(100, 512), spec(96, 512))


def gates_of_one_array() -> tuple[Callable, tuple]:
    """Of few elements, which "auto" leaves to XLA."""
    gates = asked_for(swiglu)
    gradients, operands = slopes(gates, spec(8, 2048))

    def both(x):
        return gates(x), gradients(x)

    return both, operands


LARGE: dict[str, tuple[Callable, tuple]] = {  # what runs Mosaic, or is no case's
    "softmax": slopes(softmax, spec(132, 131_072)),
    "cross_entropy": slopes(losses, spec(64, 128_256)),
    "linear": (linear, (spec(2, 1536), spec(96, 1536))),
    "gates of one array": gates_of_one_array(),
    "grouped_matmul": slopes(experts, spec(1024, 512), spec(8, 512, 512)),
    "grouped_matmul_fp8": (grouped_matmul_fp8, stored_experts()),
    "moe_ffn_fp8": (moe_ffn_fp8, stored_layer()),
    "fp8_experts beside a shared one": few_stored_experts(),
    "attention of one query": attend(1, 2048, 66),
    "attention of many": slopes(attend(0, 0, 1)[0], *attend(4096, 4096, 1)[1]),
    "one activation of packed rows": one_activation(),
    "affine rows": rows_of(quantize_affine, bits=4, group_size=64),
    "int rows": rows_of(quantize_int, bits=4, group_size=128),
    "fp8 rows": rows_of(quantize_fp8),
    "microscaled rows": rows_of(quantize_microscaled, format="mxfp4"),
    "top_k by groups": (functools.partial(top_k, k=6), (spec(8, 512),)),
    "route by warps": (
        functools.partial(route, k=8, score="sigmoid", num_groups=8, top_groups=4),
        (spec(8, 256),),
    ),
    "sample": (
        functools.partial(sample, key=jax.random.key(0), top_p=0.9),
        (spec(32, 128_256),),
    ),
}


def every_call() -> dict[str, Callable[[], Call]]:
    calls: dict[str, Callable[[], Call]] = {
        name: lambda call=call: [call]
        for name, call in {**LARGE, **every.CALLS}.items()
    }
    for row in every.ROWS:
        p, case = row.values
        functions = functools.partial(every.functions_of, p, case)
        calls[str(row.id)] = lambda functions=functions: list(functions())
    return calls


def kernels_of(call: Call) -> set[Kernel]:
    return {
        (row.runs, launch.name.rstrip("0123456789"))
        for f, operands in call
        for row in explain(f, *operands, platform="cuda").rows
        for launch in row.launches
    }


def elements(call: Call) -> int:
    leaves = jax.tree.leaves([operands for _, operands in call])
    return sum(math.prod(x.shape) for x in leaves if hasattr(x, "shape"))


def fewest_calls(calls: dict[str, Callable[[], Call]]) -> dict[str, set[Kernel]]:
    """Calls and the kernels that each is for; small ones first, the smallest last."""
    made = {name: make() for name, make in calls.items()}
    found: dict[str, set[Kernel]] = {}
    seen: set[Kernel] = set()
    sizes = {name: elements(call) for name, call in made.items()}
    for name in sorted(made, key=lambda name: (sizes[name] < TINY, sizes[name])):
        if new := kernels_of(made[name]) - seen:
            found[name] = new
            seen |= new
    return found


def without_a_call(found: dict[str, set[Kernel]]) -> list[str]:
    """Lines of the table none of whose passes runs."""
    ran = {runs for kernels in found.values() for runs, _ in kernels}
    return [k.module for k in KERNELS if ran.isdisjoint(titles_of(k))]


def titles_of(k: KernelLine) -> list[str]:
    p = REGISTRY.get(k.op) or LEAFWISE[k.op]
    rows = [row_of(p, k, name) for name in k.passes.split()]
    return [f"{row.backend}: {row.title}" for row in rows]


# `fewest_calls` of all for compute capability 9.0; the last test says when to renew it
FEWEST = (
    "softmax-even_unmasked",
    "quantize_vectors-turboquant",
    "update_quantized_kv_cache-turboquant",
    "rms_norm-one_row",
    "top_k-odd",
    "microscaled_matmul-nvfp4",
    "layer_norm-no_bias",
    "dynamic_tanh-no_weight",
    "interleaved_embedding-q4_0",
    "moe_rms_norm_add-both_norms",
    "affine_matmul-bits_4",
    "group_norm-odd",
    "apply_rope-interleaved",
    "fwht-two_factors",
    "gated_rms_norm-row",
    "qk_norm_rope_quantized_cache-int8_and_turboquant",
    "gates of one array",
    "l2_norm-even",
    "qk_norm_rope_cache_attention-plain",
    "branched_rms_norm-plain",
    "swiglu-odd",
    "softcap_softmax-odd",
    "add_rms_norm-mixed_dtypes",
    "qk_norm_rope_cache-ring",
    "rms_norm_add-mixed_dtypes",
    "interleaved_matmul-q8_0_vector",
    "qk_norm_rope_paged_cache-plain",
    "interleaved_matmul_add-q8_0_vector",
    "interleaved_rms_norm_matmul-q8_0_vector",
    "attention-some_rows_see_nothing",
    "interleaved_matmul_id-q4_0",
    "interleaved_swiglu-q8_0_vector",
    "rms_norm 64 for inference",
    "moe_ffn_few-plain",
    "norm_route-gpt_oss",
    "interleaved_expert_hidden-q4_0",
    "interleaved_expert_sum-q4_0",
    "microscaled_expert_hidden-mxfp4",
    "microscaled_expert_sum-mxfp4",
    "dense_expert_hidden-plain",
    "dense_expert_sum-plain",
    "fp8_expert_hidden-plain",
    "fp8_expert_sum-plain",
    "dequantize TurboQuantCodec(bits=1, group=256, seed=None, codebook=None)",
    "route-qwen3_30b",
    "argsort 3 8192 bfloat16",
    "triple_rms_norm-gemma4_26b",
    "dense_swiglu-wide",
    "dense_matmul_add-wide",
    "gated_delta_rule 64",
    "dense_rms_norm_matmul-wide",
    "kimi_delta_attention 64",
    "state_space_dual 128",
    "rms_norm-llama3_8b_decode",
    "rms_norm_quantized-llama3_8b",
    "rms_norm_mul-gemma",
    "sandwich_rms_norm-gemma3_4b",
    "rms_norm-qwen3_head_norm",
    "qk_norm_rope_cache_attention-llama3_decode",
    "head_norm_rope-qwen3_next",
    "sandwich_triple_rms_norm-gemma4_26b",
    "softcap_softmax-long",
    "add_rms_norm-llama3_8b_decode",
    "one activation of packed rows",
    "qk_norm_rope-qwen3_8b",
    "9 rows by Q2_K",
    "9 rows by INT4_128_BF16",
    "affine rows",
    "int rows",
    "fp8 rows",
    "microscaled rows",
    "layer_norm-whisper_large_v3",
    "1 rows by Q4_K",
    "linear",
    "adamw bfloat16",
    "softmax 5000 bfloat16",
    "rms_norm 5000 bfloat16",
    "indexer_scores-deepseek_v3_2_decode",
    "adamw with copies",
    "gated_delta_rule 256",
    "attention-smollm2_135m",
    "cumsum-chunk_decay",
    "100 rows by Q2_K",
    "256 rows by Q4_K",
    "argsort 3 128256 bfloat16",
    "argmax-llama3_vocab",
    "route by warps",
    "top_k by groups",
    "sample-llama3_vocab",
    "attention 64 64 bfloat16",
    "latent_attention-deepseek_v3_decode",
    "causal_conv1d-qwen3_next",
    "gated_delta_net_inputs-qwen3_next",
    "attention 96 96 bfloat16",
    "rms_norm 16384 float32",
    "attention-gpt_oss_20b",
    "decode TurboQuantCodec(bits=1, group=256, seed=None, codebook=None)",
    "sandwich of three 10007 bfloat16",
    "attention 192 128 bfloat16",
    "qkv_rope-llama",
    "attention 256 256 bfloat16",
    "top_k-llama3_vocab",
    "argsort 1 1048576 bfloat16",
    "attention-smollm2_135m_decode",
    "softmax 32768 bfloat16",
    "rms_norm 32768 float32",
    "sparse_attention-deepseek_v3_2_decode",
    "sandwich_rms_norm 16384 bfloat16",
    "moe_rms_norm_add 10007 bfloat16",
    "attention 512 512 bfloat16",
    "paged_attention-llama3_8b_decode",
    "gated_delta_step-qwen3_next_decode",
    "gated_delta_net_step-qwen3_next_decode",
    "gated_delta_net_verify-qwen3_next_drafts",
    "grouped_matmul",
    "grouped_matmul_fp8",
    "moe_ffn_fp8",
    "fp8_experts beside a shared one",
    "sample",
    "softmax 131071 bfloat16",
    "large groups bfloat16",
    "attention of many",
    "cross_entropy",
    "sparse_attention-nsa_decode",
    "gated_rms_norm 131072 bfloat16",
    "rms_norm_add 131072 bfloat16",
    "attention-llama3_8b_prefill",
    "linear_cross_entropy-llama3_vocabulary",
    "summed_linear_cross_entropy-llama3_vocabulary",
    "softmax",
    "fp8_matmul-deepseek_v3_down",
    "embedding bfloat16",
    "fwht bfloat16",
    "grouped_matmul-qwen3_30b_on_one_of_8_devices",
    "attention of one query",
    "cross_entropy-bf16_one_token",
    "dual_rms_norm-one_weight",
    "sample-plain",
    "int_matmul-int8",
    "weighted_cross_entropy-bf16",
    "sample-even",
    "encode_fp8-plain",
    "encode_rows_fp8-odd",
    "swiglu_rows_fp8-packed",
    "affine_matmul_id-few_rows",
    "add_rms_norm_quantized-plain",
    "int_matmul_id-int8",
    "dequantize_interleaved-q8_0_row",
    "microscaled_matmul_id-mxfp4",
    "experts of a prompt",
    "gated_rms_norm 10007 bfloat16",
    "rms_norm_add 10007 bfloat16",
    "sandwich_rms_norm 10007 float32",
    "gated_rms_norm 131072 float32",
    "sandwich_rms_norm 131072 bfloat16",
    "rms_norm_add 131072 float32",
    "sandwich of three 131072 bfloat16",
    "rms_norm-llama3_8b_prefill",
    "rms_norm_mul-no_weight",
)


TAKEN: set[tuple] = set()  # in this process; `make test-full` compiles every launch


def likeness(launch: Launch) -> tuple:
    """Alike are launches of a kernel that differ in numbers other than 0 and 1."""
    constants = tuple((name, without_numbers(x)) for name, x in launch.constants)
    warps = launch.num_warps > 4
    return launch.name.rstrip("0123456789"), launch.operands, constants, warps


def without_numbers(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x), tuple(map(without_numbers, x))
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return type(x) if is_number and x not in (0, 1) else (type(x), x)


class FirstStageMade(Exception):
    """Stops a compilation."""


@pytest.fixture
def first_stage_alone(monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.cache import FileCacheManager

    add_stages = CUDABackend.add_stages

    def stop(*given):
        raise FirstStageMade

    def add_one(self, stages: dict, *given: Any, **named: Any) -> None:
        every: dict = {}
        add_stages(self, every, *given, **named)
        name, first = next(iter(every.items()))
        stages.update({name: first, "stop": stop})

    monkeypatch.setattr(CUDABackend, "add_stages", add_one)
    # nobody reads what is stopped
    monkeypatch.setattr(FileCacheManager, "put", lambda *_, **__: "")


@pytest.mark.smoke
@pytest.mark.parametrize("name", FEWEST)
def test_this_triton_takes_every_kernel(name, first_stage_alone):
    with compiling_for(90):
        for call in every_call()[name]():
            for launch in every.launches_of(*call):
                if not isinstance(launch, Launch) or likeness(launch) in TAKEN:
                    continue
                # what another test or an earlier run has compiled does not stop
                with contextlib.suppress(FirstStageMade):
                    compiled(launch, 90)
                TAKEN.add(likeness(launch))


@pytest.mark.full
def test_no_kernel_is_left_out():
    """Renew FEWEST with `fewest_calls(every_call())`."""
    calls = every_call()
    with backend("auto"), compiling_for(90):
        found = fewest_calls(calls)
        listed = set().union(*(kernels_of(calls[name]()) for name in FEWEST))
    assert not without_a_call(found)
    assert not set().union(*found.values()) - listed
