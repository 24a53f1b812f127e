"""Models of the registry in published sizes, with weights drawn on the device.

Sizes are those of each config.json. Matrices are normal, block formats random bytes
with sane scales; norms and small vectors are what `jaxkern train` begins with. A
router spreads its choices as one does that was trained with a balanced load.
"""

import functools
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import (
    GGUFTensor,
    MicroscaledTensor,
    interleave,
    quantize_affine,
    quantize_fp8,
    quantize_int,
    quantize_microscaled,
)
from jaxkern.formats.gguf import GGUFTensorInfo
from jaxkern.models.packed_parts import experts_in_tiles, in_tiles_of
from jaxkern.models.products import FP8, Matrices, Matrix, Table
from jaxkern.models.weight_reader import WeightReader, gpu_tiles, in_8_bits
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor
from jaxkern.train.new_model import NewModel, new_model

QWEN3_5 = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "rope_type": "default",
    },
    "vocab_size": 248320,
    "tie_word_embeddings": False,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-4-E2B": GEMMA4,
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "tie_word_embeddings": False,
    },
    "Qwen3.6-35B-A3B": QWEN3_5
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
}
FP8_EXPERTS = "fp8_experts"  # experts in 8-bit floats, the others bfloat16
# where the float16 scales of a block are, and how large
SCALES = {"Q8_0": {0: 5e-4}, "Q6_K": {208: 2e-4}, "Q4_K": {0: 2e-3, 2: 0.015}}
CONTAINERS = {
    "int4": functools.partial(quantize_int, bits=4, group_size=128),
    "affine4": functools.partial(quantize_affine, bits=4, group_size=64),
    "fp8": functools.partial(quantize_fp8, block=(128, 128)),
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
}


def blocks(key: jax.Array, shape: tuple[int, ...], kind: str) -> GGUFTensor:
    """Random bytes, with scales of their own."""
    form = BLOCK_FORMATS[kind]
    rows = (*shape[:-1], shape[-1] // form.elements, form.bytes)
    drawn = jax.random.bits(key, rows, "uint8")
    for at, scale in SCALES[kind].items():
        half = np.array([scale], np.float16).view(np.uint8)
        drawn = drawn.at[..., at : at + 2].set(half)
    return GGUFTensor(drawn.reshape(*shape[:-1], -1), kind)


@functools.cache
def drawn(kind: str, f: int, d: int):
    """A function of a key that makes a matrix."""

    @jax.jit
    def draw(key) -> Matrix:
        if kind in SCALES:
            return interleave(blocks(key, (f, d), kind))
        w = jax.random.normal(key, (f, d), jnp.bfloat16) * d**-0.5
        return w if kind == "bf16" else CONTAINERS[kind](w)

    return draw


@functools.cache
def drawn_experts(kind: str, shape: tuple[int, int, int]):
    """A function of a key that makes experts `[e, f, d]`.

    "mxfp4" is row by row, "MXFP4" 16 rows side by side.
    """
    e, f, d = shape

    @jax.jit
    def draw(key) -> jax.Array | QuantizedTensor:
        if kind in SCALES:
            return interleave(blocks(key, shape, kind))
        if kind in ("mxfp4", "MXFP4"):
            scales = jax.random.randint(key, (e, f, d // 32), 118, 122, jnp.uint8)
            codes = jax.random.bits(key, (e, f, d // 2), "uint8")
            w = MicroscaledTensor(codes, scales, format="mxfp4")
            return w if kind == "mxfp4" else interleave(w)
        return jax.random.normal(key, shape, jnp.bfloat16) * d**-0.5

    return draw


class DrawnReader(WeightReader):
    """Matrices of one kind on the device; vectors as those of a new model.

    Args:
      file: of `new_model`.
      shapes: of its tensors.
      kind: of the matrices; the table is bfloat16.
      experts: of the experts, `kind` where None.
    """

    def __init__(self, file: NewModel, shapes, kind: str, experts: str | None = None):
        super().__init__(file, shapes, "bf16")
        self._kind, self._experts = kind, experts or kind
        self._numbers = iter(range(10**6))
        self.numerics = dict(
            dtype="bfloat16", product_dtype=None, fused=jax.default_backend() == "gpu"
        )

    def key(self) -> jax.Array:
        return jax.random.key(next(self._numbers))

    def vector(self, name: str, *, plus: float = 0.0) -> jax.Array:
        del plus  # norms are 1 as the page reads them
        shape = self._shapes[name]
        if prod(shape) < 2**16:
            return jnp.asarray(self.file.view(name))
        return jax.random.normal(self.key(), shape) * shape[-1] ** -0.5

    def matrices(self, *names: str) -> Matrices:
        rows = sum(self._shapes[name][0] for name in names)
        kind = self._kind
        if kind in SCALES and rows % 16:  # as the loader: what has no tiles apart
            whole = [name for name in names if self._shapes[name][0] % 16 == 0]
            few = [name for name in names if name not in whole]
            others = sum(self._shapes[name][0] for name in few)
            d = self._shapes[names[0]][1]
            apart = drawn("bf16", others, d)(self.key())
            return (*self.matrices(*whole), apart) if whole else (apart,)
        w = drawn(kind, rows, self._shapes[names[0]][1])(self.key())
        return (in_tiles_of(w, gpu_tiles()) if kind in CONTAINERS else w,)

    def table(self, name: str) -> jax.Array:
        return drawn("bf16", *self._shapes[name])(self.key())

    def experts(self, *names: str) -> jax.Array | QuantizedTensor:
        shape = self._shapes[names[0]]
        if len(names) > 1:
            shape = (len(names), *shape)
        kind = "bf16" if self._experts == FP8_EXPERTS else self._experts
        return drawn_experts(kind, shape)(self.key())

    def kept_experts(self, w: jax.Array) -> jax.Array | QuantizedTensor:
        return in_8_bits(w) if self._experts == FP8_EXPERTS else w

    def mxfp4(self, name: str, rows: slice = slice(None)) -> Any:
        e, f, groups, _ = self._shapes[f"{name}.blocks"]
        f = len(range(*rows.indices(f)))
        w = drawn_experts("mxfp4", (e, f, 32 * groups))(self.key())
        return experts_in_tiles(w, gpu_tiles())

    def table_and_output(self) -> tuple[Table, Matrices]:
        table = self.table("token_embd.weight")
        if not self.has("output.weight"):
            return table, (table,)
        return table, self.matrices("output.weight")


def with_mxfp4(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Experts whose rows lie along the other dim, in groups as published."""
    found = dict(shapes)
    for name in shapes:
        if name.endswith("_exps.weight"):
            (e, d, f), at = found.pop(name), name.removesuffix("weight")
            found[f"{at}blocks"] = (e, f, d // 32, 16)
            found[f"{at}scales"] = (e, f, d // 32)
    return found


def published(name: str, layers: int | None = None) -> dict[str, Any]:
    """Keys of config.json; of fewer layers as many share keys as in the whole."""
    keys = PUBLISHED[name]
    if layers is None:
        return keys
    fewer: dict[str, Any] = {"num_hidden_layers": layers}
    if kinds := keys.get("layer_types"):
        part = layers / len(kinds)
        fewer["layer_types"] = kinds[:layers]
        fewer["num_kv_shared_layers"] = int(part * keys["num_kv_shared_layers"])
    return keys | fewer


def drawn_model(name: str, kind: str, layers: int | None = None) -> tuple[Any, Any]:
    """Config and weights of a published model.

    Args:
      name: of `PUBLISHED`.
      kind: of the matrices; "mxfp4" is that of the experts, the others bfloat16. So
        are "fp8_experts", which multiply prompts in 8 bits, and "fp8_decoded", which
        are decoded for them.
      layers: fewer than there are, for a look at a few.
    """
    multiplied_so = kind == FP8_EXPERTS
    described = new_model(published(name, layers), seed=0)
    file, shapes = described.file, dict(described.tensors)
    experts = None
    if kind == "mxfp4":
        kind, experts = "bf16", "mxfp4"
        shapes = with_mxfp4(shapes)
    elif kind in (FP8_EXPERTS, "fp8_decoded"):
        kind, experts = "bf16", FP8_EXPERTS
    assert isinstance(file, NewModel)
    infos = {n: GGUFTensorInfo(s, "F32", 0, 0) for n, s in shapes.items()}
    reader = DrawnReader(replace(file, tensors=infos), shapes, kind, experts)
    weights = described.architecture.weights(described.config, reader)
    if multiplied_so:
        reader.numerics["expert_dtype"] = FP8
    return replace(described.config, **reader.numerics), weights
