"""GGUF files of the architectures `llama`, `qwen2` and `qwen3` as `LlamaWeights`."""

import functools
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkern import (
    GGUFTensor,
    InterleavedTensor,
    dequantize,
)
from jaxkern.cpu.cpu_call import missing
from jaxkern.formats.gguf import GGUFFile
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.formats.weight_memory import ALIGNMENT, WeightMemory
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights, Matrices, Matrix
from jaxkern.models.llama_config import config_from_gguf
from jaxkern.primitives.quant.gguf_blocks import FLOAT_TYPES
from jaxkern.primitives.quant.interleaved_tensor import ROWS, UNITS, interleaved

Policy = Literal["auto", "packed", "packed_int8", "f32", "bf16"]

OPTIONAL_TENSORS = (
    "output.weight",  # tied to the embedding where it is missing
    "rope_freqs.weight",
    "attn_q.bias",
    "attn_k.bias",
    "attn_v.bias",
    "attn_output.bias",
    "ffn_gate.bias",
    "ffn_up.bias",
    "ffn_down.bias",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
)
REQUIRED = {  # of those, what makes the architecture
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}
BLOCK = re.compile(r"^blk\.\d+\.")


def choose_policy(
    file: GGUFFile | SafetensorsFolder, policy: Policy = "auto"
) -> tuple[Policy, str]:
    """How the weights are kept in memory, and why.

    `packed` keeps the blocks of the file and decodes each matrix when it is used;
    `packed_int8` also rounds the activations to 8 bits before each product, as
    llama.cpp does; `f32` and `bf16` decode once, while loading. The C++ kernels read a
    packed matrix as it is, so on a CPU that has them `auto` takes `packed_int8`: the
    fastest and smallest. XLA:CPU multiplies in float32: it writes a `packed` matrix
    decoded, or a `bf16` one widened, to memory for every token. So without kernels
    `auto` takes `f32` where the memory allows it, else `packed`; `bf16` on other
    devices. docs/performance.md has the figures.

    Returns:
      The policy, never "auto", and the reason in words.
    """
    if policy not in get_args(Policy):
        raise ValueError(
            f"load: `weights` must be one of {', '.join(get_args(Policy))}, "
            f"got {policy!r}."
        )
    if policy != "auto":
        return policy, "asked for"
    if gpu_formats().intersection(info.qtype for info in file.tensors.values()):
        return "packed", "Triton kernels read it as it is; the fewest bytes"
    if jax.default_backend() != "cpu":
        return "bf16", "decoded once; products of bfloat16 are what the device is for"
    if missing() is None:
        return "packed_int8", "C++ kernels read it as it is; activations of 8 bits"
    need, free = expanded_bytes(file, 4), available_memory()
    sizes = f"float32 takes {need / 1e6:.0f} MB of {free / 1e6:.0f} MB available"
    if need > free:
        return "packed", f"{sizes}; decoded at each use: smaller and slower"
    return "f32", f"{sizes}; decoded once: the fastest on a CPU"


def gpu_formats() -> set[str]:
    """Block formats that products on this machine's GPU read as they are."""
    if jax.default_backend() != "gpu":
        return set()
    from jaxkern.triton.quant import packed_products

    return set() if packed_products.unsupported_anywhere() else {*packed_products.BYTES}


def expanded_bytes(file: GGUFFile | SafetensorsFolder, itemsize: int) -> int:
    """Memory of the decoded matrices; a tied embedding is decoded as output only."""
    sizes = {name: prod(info.shape) for name, info in file.tensors.items()}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]  # its rows are decoded when they are looked up
    return itemsize * sum(sizes.values())


def available_memory() -> int:
    """Bytes that the machine has left, page cache included."""
    try:
        with open("/proc/meminfo") as meminfo:
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def load_llama(
    file: GGUFFile | SafetensorsFolder,
    policy: Policy = "auto",
    *,
    config: LlamaConfig | None = None,
) -> tuple[LlamaConfig, LlamaWeights]:
    """Loads a model, one tensor after the other.

    The peak is the file, the weights as they are kept, and one tensor more. Matrices
    with the same input are decoded into one. The embedding table stays as it is in the
    file: only rows that are looked up are decoded; a tied output is decoded apart.

    Args:
      file: of `jaxkern.formats.gguf.read_gguf`, or a folder with these names.
      policy: see `choose_policy`.
      config: of the model, default what a GGUF file says of it.

    Raises:
      GGUFError: see `config_from_gguf`; or a tensor is missing, has another shape than
        the metadata say, or has no place in the model.
    """
    if config is None:
        assert isinstance(file, GGUFFile)
        config = config_from_gguf(file)
    policy, _ = choose_policy(file, policy)
    packed = policy in ("packed", "packed_int8")
    on_cpu = jax.default_backend() == "cpu" and missing() is None
    formats = gpu_formats() if packed else set()
    with_kernels = on_cpu or bool(formats)
    narrow = policy == "bf16" or bool(formats)
    config = replace(
        config,
        dtype="bfloat16" if narrow else "float32",
        product_dtype="int8" if policy == "packed_int8" else None,
        fused=narrow and jax.default_backend() == "gpu",
    )
    shapes = _check_tensors(file, tensor_shapes(config))

    memory = WeightMemory(
        sum(info.nbytes + ALIGNMENT for info in file.tensors.values())
        if packed and on_cpu
        else 0
    )

    def vector(name: str) -> jax.Array:
        w = file.load(name)
        w = dequantize(w) if isinstance(w, GGUFTensor) else w
        w = jnp.array(w, jnp.float32, copy=True)  # out of the map, whose pages may go
        file.forget(name)
        return w

    def vectors(*names: str) -> jax.Array | None:
        """Side by side, zeros for what is missing; None where all are."""
        if not any(name in file.tensors for name in names):
            return None
        parts = [
            vector(name) if name in file.tensors else jnp.zeros(shapes[name])
            for name in names
        ]
        return jnp.concatenate(parts)

    def matrices(*names: str) -> Matrices:
        if packed and with_kernels:
            return interleaved_matrices(file, names, memory, formats)
        stored = [file.load(name) for name in names]
        if packed:
            return tuple(
                expand([w], w.dtype) if isinstance(w, jax.Array) else w for w in stored
            )
        dtype = jnp.dtype(jnp.float32 if policy == "f32" else jnp.bfloat16)
        return (expand(stored, dtype),)

    def layer(blk: str) -> Layer:
        q, k, v = (f"{blk}.attn_{name}" for name in "qkv")
        return Layer(
            attention_norm=vector(f"{blk}.attn_norm.weight"),
            qkv=matrices(f"{q}.weight", f"{k}.weight", f"{v}.weight"),
            qkv_bias=vectors(f"{q}.bias", f"{k}.bias", f"{v}.bias"),
            q_norm=vectors(f"{q}_norm.weight"),
            k_norm=vectors(f"{k}_norm.weight"),
            attention_output=matrices(f"{blk}.attn_output.weight"),
            ffn_norm=vector(f"{blk}.ffn_norm.weight"),
            gate_up=matrices(f"{blk}.ffn_gate.weight", f"{blk}.ffn_up.weight"),
            down=matrices(f"{blk}.ffn_down.weight"),
            attention_output_bias=vectors(f"{blk}.attn_output.bias"),
            gate_up_bias=vectors(f"{blk}.ffn_gate.bias", f"{blk}.ffn_up.bias"),
            down_bias=vectors(f"{blk}.ffn_down.bias"),
        )

    tied = "output.weight" not in file.tensors
    output = matrices("token_embd.weight" if tied else "output.weight")
    table = output[0] if tied and isinstance(output[0], InterleavedTensor) else None
    weights = LlamaWeights(
        embedding=table or file.load("token_embd.weight"),
        layers=tuple(layer(f"blk.{i}") for i in range(config.layers)),
        output_norm=vector("output_norm.weight"),
        output=output,
        rope_factors=vectors("rope_freqs.weight"),
    )
    return config, jax.block_until_ready(weights)


@functools.partial(jax.jit, static_argnames="dtype")
def expand(
    stored: Sequence[jax.Array | GGUFTensor], dtype: jnp.dtype
) -> Float[Array, "d f"] | Float[Array, "f d"]:
    """Stored matrices `[f, d]` decoded, side by side; see `Matrix` for the layout."""
    decoded = [
        dequantize(w, dtype=dtype) if isinstance(w, GGUFTensor) else w.astype(dtype)
        for w in stored
    ]
    w = jnp.concatenate(decoded)
    return w if dtype != jnp.float32 or w.shape[0] < w.shape[1] else w.T


def interleaved_matrices(
    file: GGUFFile | SafetensorsFolder,
    names: Sequence[str],
    memory: WeightMemory,
    gpu_formats: Collection[str] = (),
) -> Matrices:
    """Matrices of one block format side by side, their rows interleaved where 16 fit.

    So a product reads the activations once, and the kernels whole vectors. The host
    puts them together: nothing is compiled, and of the file no page stays in memory.
    On a GPU, that is, with `gpu_formats`, what its kernels do not read is decoded.
    """
    groups = [
        (qtype, [file.view(name) for name in group])
        for qtype, group in itertools.groupby(names, lambda n: file.tensors[n].qtype)
    ]
    parts: list[Matrix] = []
    for qtype, views in groups:
        rows = views[0] if len(views) == 1 else np.concatenate(views)
        if qtype in FLOAT_TYPES:
            dtype = jnp.dtype(jnp.bfloat16) if gpu_formats else rows.dtype
            parts.append(expand([jax.device_put(rows)], dtype))
            continue
        tiled = qtype in UNITS and rows.shape[0] % ROWS == 0
        if gpu_formats and not (tiled and qtype in gpu_formats):
            whole = GGUFTensor(jax.device_put(rows), qtype)
            parts.append(expand([whole], jnp.dtype(jnp.bfloat16)))
        elif tiled:
            tiles = memory.place(interleaved(rows, qtype))
            parts.append(InterleavedTensor(tiles, qtype))
        else:
            parts.append(GGUFTensor(memory.place(rows), qtype))
    for name in names:
        file.forget(name)
    return tuple(parts)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a file of this model may have, as stored."""
    d, h = config.d_model, config.head_dim
    q, k = config.heads * h, config.kv_heads * h
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocabulary, d),
        "output.weight": (config.vocabulary, d),
        "output_norm.weight": (d,),
        "rope_freqs.weight": (config.rotary_dim // 2,),
    }
    block = {
        "attn_norm.weight": (d,),
        "attn_q.weight": (q, d),
        "attn_k.weight": (k, d),
        "attn_v.weight": (k, d),
        "attn_q.bias": (q,),
        "attn_k.bias": (k,),
        "attn_v.bias": (k,),
        "attn_q_norm.weight": (h,),
        "attn_k_norm.weight": (h,),
        "attn_output.weight": (d, q),
        "attn_output.bias": (d,),
        "ffn_norm.weight": (d,),
        "ffn_gate.weight": (-1, d),
        "ffn_up.weight": (-1, d),
        "ffn_down.weight": (d, -1),
        "ffn_gate.bias": (-1,),
        "ffn_up.bias": (-1,),
        "ffn_down.bias": (d,),
    }
    for i in range(config.layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def _check_tensors(
    file: GGUFFile | SafetensorsFolder, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes after the file's tensors fit them; -1 is the width of the layer."""
    fitting: dict[str, tuple[int, ...]] = {}
    required = REQUIRED.get(file.architecture, ())
    for name, shape in shapes.items():
        gate = file.tensors.get(f"{name.partition('.ffn_')[0]}.ffn_gate.weight")
        width = gate.shape[0] if gate else -1
        shape = fitting[name] = tuple(width if n < 0 else n for n in shape)
        info = file.tensors.get(name)
        if info is None:
            kind = BLOCK.sub("", name)
            if kind not in OPTIONAL_TENSORS or kind in required:
                raise file.error(f"has no tensor {file.called(name)}")
        elif info.shape != shape:
            raise file.error(
                f"tensor {file.called(name)} is {info.shape}, expected {shape} by the "
                "metadata and the tensors beside it"
            )
    if strangers := [name for name in file.tensors if name not in shapes]:
        raise file.error(
            f"tensor {file.called(strangers[0])} has no place in a model of "
            f"architecture {file.architecture}"
        )
    return fitting
