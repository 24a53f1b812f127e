"""What this library aims at on one NVIDIA H200, and on two.

A goal bounds one figure of one case of a benchmark. `goals.py` measures and judges.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

JAXKERN = "jaxkern"
COMPILED = ("XLA", "torch.compile", "Liger")
JAX_ATTENTION = ("cuDNN", "jla", "tokamax")
BY_XLA = ("bfloat16 by XLA",)


class At(NamedTuple):
    """Where benchmarks/records have a case under another name."""

    case: str
    which: str


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on one figure of one case.

    Attributes:
      module: of the benchmark.
      record: name of the benchmark in it.
      case: one of its cases.
      which: "forward", "backward", "both", "error" or "gradient error", or what a
        script measures: "16 rows", "decode", "step".
      times: at least so many times as fast as the best of `than`; of an error, at most
        so many times the largest of `than`.
      share: at least this share of the measured limit, in percent.
      us, ms, seconds: at most so many.
      tflops: at least so many TFLOP/s.
      tokens: at least so many tokens/s.
      of_bytes: at most so many times what its bytes take at the rate of a copy.
      megabytes: beside one of these, at most so many of temporaries.
      than: the implementations to compare with.
      ours: whose figure it is.
      at: where the records have it.
    """

    module: str
    record: str
    case: str
    which: str
    times: float | None = None
    share: float | None = None
    us: float | None = None
    ms: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    tokens: float | None = None
    of_bytes: float | None = None
    megabytes: float | None = None
    than: tuple[str, ...] = ()
    ours: str = JAXKERN
    at: At | None = None


def row_goals() -> Iterator[Goal]:
    for case in ("16384x4096", "8192x8192", "4096x16384", "131072x128"):
        norm = ("rms_norm", "rms_norm", case)
        yield Goal(*norm, "forward", times=1.0, than=COMPILED)
        yield Goal(*norm, "both", times=1.0, than=COMPILED)
        yield Goal(*norm, "forward", share=92)
        yield Goal(*norm, "backward", share=88)
    yield Goal("softmax", "softmax", "2048x131072", "forward", times=1.5, than=("XLA",))
    yield Goal("softmax", "softmax", "2048x131072", "both", times=1.5, than=("XLA",))
    for which in ("forward", "backward"):
        yield Goal("swiglu", "swiglu", "8192x14336", which, share=92)
        yield Goal("rope", "rope", "llama3_8b_8192", which, share=88)
        interleaved = ("rope_interleaved", "rope_interleaved", "llama3_8b_8192")
        yield Goal(*interleaved, which, share=88)
    yield Goal("fwht", "fwht", "16384x8192 bfloat16", "forward", share=90)
    leaves = ("adamw", "adamw", "300 leaves of 1e6, float32")
    yield Goal(*leaves, "forward", times=1.1, than=("optax",))


def loss_goals() -> Iterator[Goal]:
    loss = ("cross_entropy", "cross_entropy", "8192x128256")
    yield Goal(*loss, "both", times=1.5, than=("Liger",))
    trained = ("cross_entropy", "cross_entropy_trained", "8192x128256")
    yield Goal(*trained, "forward", times=1.5, than=("Liger",))
    # 10 % and 3 % of the bytes of the logits, 8192 x 128256 of bfloat16
    linear = ("linear_cross_entropy", "linear_cross_entropy", "8192x4096x128256")
    yield Goal(*linear, "both", ms=34, megabytes=210)
    yield Goal(*linear, "both", ms=37, megabytes=63)


def product_goals() -> Iterator[Goal]:
    by_int = ("int_matmul", "int_matmul", "int4 by 128 8192x8192")
    yield Goal(*by_int, "1 row", us=14)
    for rows in (16, 32, 64):
        yield Goal(*by_int, f"{rows} rows", times=1.0, than=("humming",))
    packed = ("interleaved_matmul", "interleaved_matmul")
    yield Goal(*packed, "Q4_K 28672x8192", "1 row", us=39)
    yield Goal(*packed, "Q4_K 14336x4096", "1 row", us=12)
    for kind in ("Q6_K", "Q5_K", "Q8_0"):
        yield Goal(*packed, f"{kind} 28672x8192", "1 row", share=78)
    yield Goal("fp8", "fp8", "128 by 128 28672x8192", "1 row", share=78)
    mxfp4 = ("microscaled", "microscaled", "mxfp4 28672x8192")
    yield Goal(*mxfp4, "1 row", share=78)
    yield Goal("linear", "linear", "28672x8192", "1 row", share=100)
    yield Goal("linear", "linear", "4096x4096", "1 row", us=9)
    many = {"which": "4096 rows", "times": 0.95, "than": BY_XLA}
    yield Goal(*by_int, **many)
    yield Goal("affine_matmul", "affine_matmul", "4 bits 8192x8192", **many)
    yield Goal("microscaled", "microscaled", "mxfp4 8192x8192", **many)
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        yield Goal(*packed, f"{kind} 8192x8192", **many)
    yield Goal("fp8", "fp8", "128 by 128 8192x8192", "4096 rows", tflops=1150)


def choice_goals() -> Iterator[Goal]:
    for name in ("sample_all", "sample_top_p", "sample_min_p"):
        for scale in (1, 4):
            case = f"32x128256 float32 scale {scale}"
            yield Goal("sample", name, case, "forward", us=25)
    for scale in (1, 4):
        case = f"128x50257 float32 scale {scale}"
        yield Goal("sample", "sample_top_p", case, "forward", us=30)
    greedy = ("argmax", "argmax", "128x50257 float32")
    yield Goal(*greedy, "forward", times=1.0, than=("XLA",))
    for dtype in ("float32", "bfloat16"):
        yield Goal("top_k", "top_k_6", f"16384x512 {dtype}", "forward", us=12)
    for case in ("8192x128 float32", "4096x256 float32"):
        yield Goal("top_k", "top_k_8", case, "forward", us=12)
    for k in (8, 64):
        yield Goal("top_k", f"top_k_{k}", "1x1000000 float32", "forward", us=25)
    grouped = ("route", "route, sigmoid, bias and groups")
    yield Goal(*grouped, "8192 tokens of 256 experts", "forward", us=15)


def attention_goals() -> Iterator[Goal]:
    for case in ("b4_s4096_d128", "b1_s16384_d128"):
        causal = ("attention", "attention", case)
        yield Goal(*causal, "forward", times=1.0, than=("FA3",))
        yield Goal(*causal, "both", times=0.95, than=("FA3",))
        yield Goal(*causal, "forward", times=1.1, than=JAX_ATTENTION)
        yield Goal(*causal, "both", times=1.1, than=JAX_ATTENTION)
        for which in ("error", "gradient error"):
            yield Goal(*causal, which, times=1.2, than=("FA3", "cuDNN"))
    yield Goal("attention", "attention", "b4_s4096_d128", "forward", tflops=640)
    for case in ("b4_s4096_d72", "b4_s4096_d80", "b8_s700_d128"):
        for which in ("forward", "both"):
            odd = ("attention", "attention", case, which)
            yield Goal(*odd, times=1.0, than=("cuDNN", "XLA"))
    wide = ("attention", "attention", "b4_s4096_d256")
    yield Goal(*wide, "both", times=1.1, than=("cuDNN",))
    packed = ("attention", "attention_documents", "b1_s16384_d128_documents")
    yield Goal(*packed, "forward", times=2.0, than=("cuDNN, mask",))
    yield Goal(*packed, "both", times=2.0, than=("cuDNN, mask",))
    window = ("attention", "attention_window", "b1_s16384_d128")
    yield Goal(*window, "forward", times=1.2, than=("cuDNN",))
    yield Goal(*window, "both", times=1.2, than=("cuDNN",))
    known = "b2_s4096, 32 heads of 192 and 128 *"
    latent = ("attention", "attention_latent_prefill", "b2_s4096_d192_v128")
    cudnn = {"times": 1.0, "than": ("cuDNN",)}
    yield Goal(*latent, "forward", **cudnn, at=At(known, "forward"))
    yield Goal(*latent, "backward", **cudnn, at=At(f"{known} *", "backward"))


def decode_goals() -> Iterator[Goal]:
    batch = ("decode_attention", "decode_attention", "B32 S4096 H32 kv8 D128")
    yield Goal(*batch, "forward", times=1.05, than=("cuDNN",))
    yield Goal(*batch, "forward", share=90)
    for tokens, us in ((4096, 11), (16384, 23), (65536, 70)):
        one = ("decode_attention", "decode_attention", f"B1 S{tokens} H32 kv8 D128")
        yield Goal(*one, "forward", us=us)
    quantised = ("quantized_cache_attention", "quantized_cache_attention")
    for b in (1, 16):
        for codec, times in (("int8", 1.7), ("int4", 2.5), ("turbo4", 2.5)):
            case = f"{codec} B{b} S65536 H32 kv8 D128"
            than = ("jaxkern, bf16 cache",)
            yield Goal(*quantised, case, "forward", times=times, than=than)
    for case in ("B128 S4096 H128", "B1 S65536 H128"):
        latent = ("latent_attention", "latent_attention", case)
        yield Goal(*latent, "forward", times=1.0, than=("FlashInfer",))


def expert_goals() -> Iterator[Goal]:
    products = ("grouped_matmul", "grouped_matmul")
    codes = ("grouped_matmul_fp8", "grouped_matmul_fp8, codes")
    for sizes in ("equal", "skewed"):
        case = f"32768x4096x2048 in 64, {sizes}"
        known = f"32768x4096x2048 in 64 {sizes} groups"
        forward = At(known, "forward")
        yield Goal(*products, case, "forward", tflops=640, at=forward)
        both = At(known, "dx and dw")
        yield Goal(*products, case, "backward", tflops=600, at=both)
        coded = At(f"{known}, codes", "forward")
        yield Goal(*codes, case, "forward", tflops=1100, at=coded)
    layer = ("moe_ffn", "moe_ffn", "8192 tokens of 2048, 8 of 256 experts of 512")
    known = "8192 tokens, 2048 dims, 8 of 256 experts of 512"
    ragged = {"times": 4.0, "than": ("lax.ragged_dot",)}
    yield Goal(*layer, "both", **ragged, at=At(known, "both"))
    # 1.5 times what the experts that are reached take at 4.8 TB/s
    few = ("moe_ffn", "moe_ffn_few")
    one = "1 tokens of 2048, 8 of 256 experts of 512"
    yield Goal(*few, one, "forward", us=15.7)
    yield Goal(*few, "32 tokens of 2048, 8 of 256 experts of 512", "forward", us=325)


def delta_rule_goals() -> Iterator[Goal]:
    rule = ("gated_delta_rule", "gated_delta_rule")
    for case, forward, both in (
        ("2x8192, 16/16 heads", 280, 850),
        ("1x32768, 16/32 heads", 660, 2500),
        ("8x4096, 16/32 heads", 580, 2300),
    ):
        yield Goal(*rule, case, "forward", us=forward)
        yield Goal(*rule, case, "both", us=both)
    yield Goal(*rule, "8x4096, 8/32 heads", "forward", us=420)
    step = ("gated_delta_step", "gated_delta_step")
    yield Goal(*step, "B32 H32 128x128 float32", "forward", us=36)
    yield Goal(*step, "B1 H32 128x128 float32", "forward", us=3.4)
    fla = {"times": 1.0, "than": ("fla",)}
    kimi = ("kimi_delta_attention", "kimi_delta_attention", "2x8192, 16 heads")
    yield Goal(*kimi, "forward", **fla)
    yield Goal(*kimi, "both", **fla)
    dual = ("state_space_dual", "state_space_dual", "1x4096, 48 heads")
    yield Goal(*dual, "forward", **fla)
    yield Goal(*dual, "both", **fla)


def model_goals() -> Iterator[Goal]:
    generate = ("gpu_generate", "gpu_generate")
    for case, tokens in (
        ("8B Q4_K_M", 600),
        ("8B Q8_0", 430),
        ("8B bfloat16", 265),
        ("1.5B bfloat16", 1400),
        ("1.5B Q4_K_M", 2200),
    ):
        yield Goal(*generate, case, "decode", tokens=tokens)
        behind = f"{case} behind 7936 tokens"
        yield Goal(*generate, behind, "decode", tokens=0.9 * tokens)
    for case, tokens in (("8B Q4_K_M", 35_000), ("1.5B bfloat16", 180_000)):
        yield Goal(*generate, f"{case}, 4096 tokens", "prefill", tokens=tokens)
    yield Goal(*generate, "8B bfloat16, 32 sequences", "decode", of_bytes=1.15)
    start = ("compile_time", "compile_time")
    yield Goal(*start, "8B Q4_K_M, first start", "first token", seconds=6)
    yield Goal(*start, "8B Q4_K_M, second start", "first token", seconds=2)


def training_goals() -> Iterator[Goal]:
    step = ("train_step", "train_step", "1.3B, 8x2048", "step")
    yield Goal(*step, share=60)
    yield Goal(*step, times=1.22, than=("plain, scanned",))
    yield Goal(*step, times=1.12, than=("plain, unrolled",))
    yield Goal(*step, times=1.25, than=(JAXKERN,), ours="jaxkern, fp8")
    for case in ("hybrid, 4 layers, 4x2048", "experts, 2 layers, 4x2048"):
        beside = ("train_references", "train_references", case, "step")
        yield Goal(*beside, times=2.0, than=("references",))
    two = ("train_devices", "train_devices", "1.3B, 8x2048, 2 GPUs", "step")
    yield Goal(*two, share=92, ours="jaxkern, data parallel")
    yield Goal(*two, share=92, ours="jaxkern, FSDP")
    tensor = ("decode_devices", "decode_devices", "8B bfloat16", "decode")
    one = ("jaxkern, one GPU",)
    yield Goal(*tensor, times=1.6, than=one, ours="jaxkern, 2 GPUs")


GOALS = (
    *row_goals(),
    *loss_goals(),
    *product_goals(),
    *choice_goals(),
    *attention_goals(),
    *decode_goals(),
    *expert_goals(),
    *delta_rule_goals(),
    *model_goals(),
    *training_goals(),
)
