"""How weights are kept in memory: policies, and the reader that pages load with."""

import functools
import itertools
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkern import (
    AffineTensor,
    FP8Tensor,
    GGUFTensor,
    InterleavedTensor,
    MicroscaledTensor,
    dequantize,
    quantize_fp8,
)
from jaxkern.cpu.cpu_call import missing
from jaxkern.formats.finite_weights import FiniteCheck
from jaxkern.formats.gguf import GGUFFile
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.formats.weight_memory import ALIGNMENT, WeightMemory
from jaxkern.models.packed_parts import (
    experts_in_tiles,
    in_tiles,
    in_tiles_of,
    rows_of_blocks,
    side_by_side,
    stacked_containers,
)
from jaxkern.models.products import FP8, Matrices, Matrix, Table
from jaxkern.primitives.quant.gguf_blocks import FLOAT_TYPES
from jaxkern.primitives.quant.interleaved_tensor import ROWS, UNITS, interleaved
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor
from jaxkern.primitives.quant.requantize import exact_forms

EXACT = 1e-6  # of the norm: differences in the last place of float32

Policy = Literal[
    "auto", "packed", "packed_int8", "f32", "bf16", "fp8_experts", "affine", "train"
]


def choose_policy(
    file: GGUFFile | SafetensorsFolder, policy: Policy = "auto"
) -> tuple[Policy, str]:
    """How the weights are kept in memory, and why.

    `packed` keeps the blocks of the file and decodes each matrix when it is used (on
    GPUs with 16 rows side by side, from Hopper on those of folders too);
    `packed_int8` also rounds the activations to 8 bits before each product, as
    llama.cpp does; `f32` and `bf16` decode once, while loading; `affine` is `packed`,
    but blocks of a GGUF file become the very same weights in MLX's affine format where
    it holds them (see `requantize`): what the fused kernels of jax-mps read on Apple
    GPUs, where nothing was measured, so `auto` does not take it; `fp8_experts` is
    `bf16`, but experts of a mixture are rounded to 8-bit floats with a scale for each
    row, and so is what they read of more than 8 tokens, which they multiply in 8 bits:
    faster on Hopper, by an error that is not that of the file, so `auto` does not take
    it either. Experts that a file has in 8-bit floats stay as they are; with scales of
    blocks along a row they become rows, exactly where these are powers of two of each
    other, else rounded once more, and by how much is logged. `train` gives what
    `jaxkern.train` takes: float32, matrices as they lie in the file, a tied table once.
    The C++ kernels read a packed matrix as it is, so on a CPU that has them `auto`
    takes `packed_int8`: the fastest and smallest. XLA:CPU multiplies in float32: it
    writes a `packed` matrix decoded, or a `bf16` one widened, to memory for every
    token. So without kernels, which the packed weights of folders have not on a CPU,
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
    containers = has_containers(file)
    formats = {info.qtype for info in file.tensors.values()}
    if gpu_formats() & formats or (gpu_formats() and containers):
        how = "16 rows side by side" if gpu_tiles() else "as it is"
        return "packed", f"Triton kernels read it {how}; the fewest bytes"
    if jax.default_backend() != "cpu":
        return "bf16", "decoded once; products of bfloat16 are what the device is for"
    if missing() is None and not containers:
        return "packed_int8", "C++ kernels read it as it is; activations of 8 bits"
    need, free = expanded_bytes(file, 4), available_memory()
    sizes = f"float32 takes {need / 1e6:.0f} MB of {free / 1e6:.0f} MB available"
    if need > free:
        return "packed", f"{sizes}; decoded at each use: smaller and slower"
    return "f32", f"{sizes}; decoded once: the fastest on a CPU"


def has_containers(file: GGUFFile | SafetensorsFolder) -> bool:
    """Whether it is a folder with packed weights."""
    return isinstance(file, SafetensorsFolder) and any(
        map(file.is_packed, file.tensors)
    )


def gpu_formats() -> set[str]:
    """Block formats that products on this machine's GPU read as they are."""
    if jax.default_backend() != "gpu":
        return set()
    from jaxkern.triton.quant import packed_products

    return set() if packed_products.unsupported_anywhere() else {*packed_products.BYTES}


def gpu_tiles() -> set[str]:
    """Formats of packed weights of folders that loaders interleave for this GPU.

    Its kernel for one activation by whole numbers reads them near the rate of a copy.
    """
    if not gpu_formats():
        return set()
    from jaxkern.triton.quant import packed_products

    return {*packed_products.fixed_point_formats()}


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


class WeightReader:
    """Loads the weights of a model, one tensor after the other.

    The peak is the file, the weights as they are kept, and one tensor more. Matrices
    with the same input are decoded into one.

    Args:
      file: with the names of a GGUF file.
      tensors: every tensor that it may have, checked against it.
      policy: see `choose_policy`.

    Attributes:
      file: as given; what is read of it must be finite, see `finish`.
      numerics: `dtype`, `product_dtype` and `fused` of the config, and `expert_dtype`
        where the policy is about experts.
    """

    def __init__(
        self,
        file: GGUFFile | SafetensorsFolder,
        tensors: Mapping[str, tuple[int, ...]],
        policy: Policy = "auto",
    ):
        self._finite = FiniteCheck()
        self.file, self._shapes = file.checked(self._finite), tensors
        self._policy, _ = choose_policy(file, policy)
        as_blocks = self._policy in ("packed", "packed_int8")
        self._packed = as_blocks or self._policy == "affine"
        on_cpu = jax.default_backend() == "cpu" and missing() is None and as_blocks
        self._formats = gpu_formats() if as_blocks else set()
        self._with_kernels = on_cpu or bool(self._formats)
        narrow = self._policy in ("bf16", "fp8_experts") or bool(self._formats)
        dtype = "train" if self._policy == "train" else "float32"
        self.numerics: dict[str, Any] = dict(
            dtype="bfloat16" if narrow else dtype,
            product_dtype="int8" if self._policy == "packed_int8" else None,
            fused=narrow and jax.default_backend() == "gpu",
        )
        if self._policy == "fp8_experts":
            self.numerics["expert_dtype"] = FP8
        # sums of squares of experts in other rows than in the file: off by, of
        self._requantised: list[tuple[jax.Array, jax.Array]] = []
        self._memory = WeightMemory(
            sum(info.nbytes + ALIGNMENT for info in file.tensors.values())
            if on_cpu
            else 0
        )

    def finish(self) -> None:
        """Raises the error of the file for weights that are not finite.

        Says what experts lost that were rounded once more.
        """
        self._finite.finish()
        off, size = (sum(float(s[i]) for s in self._requantised) for i in (0, 1))
        lost = (off / size) ** 0.5 if size else 0.0
        if lost > EXACT:
            logging.getLogger("jaxkern").warning(
                "%s: experts in 8-bit floats were requantised from blocks to rows, "
                "which is off by %.2g %% of their norm. weights='packed' and 'bf16' "
                "keep them as they are.",
                self.file.path,
                100 * lost,
            )

    @property
    def from_folder(self) -> bool:
        """Whether it is a folder of Hugging Face, whose conventions may differ."""
        return isinstance(self.file, SafetensorsFolder)

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def vector(self, name: str, *, plus: float = 0.0) -> jax.Array:
        """A tensor of any rank in float32; `plus` for norms that are stored less 1."""
        w = self.file.load(name)
        w = w if isinstance(w, jax.Array) else dequantize(w)
        w = jnp.array(w, jnp.float32, copy=True)  # out of the map, whose pages may go
        self.file.forget(name)
        return w + plus if plus else w

    def vectors(self, *names: str, plus: float = 0.0) -> jax.Array | None:
        """Side by side, zeros for what is missing; None where all are."""
        if not any(map(self.has, names)):
            return None
        parts = [
            self.vector(name, plus=plus)
            if self.has(name)
            else jnp.zeros(self._shapes[name])
            for name in names
        ]
        return jnp.concatenate(parts)

    def matrices(self, *names: str) -> Matrices:
        """Matrices `[f, d]` with the same input, side by side."""
        if self._packed and any(map(self.is_packed, names)):
            parts: list[Any] = [
                (in_tiles_of(self.file.load(name), gpu_tiles()),)
                if self.is_packed(name)
                else self.matrices(name)
                for name in names
            ]
            return side_by_side([w for part in parts for w in part])
        if self._packed and self._with_kernels:
            return interleaved_matrices(self.file, names, self._memory, self._formats)
        if self._policy == "train":
            return (jnp.concatenate([self.array(name) for name in names]),)
        if self._packed:
            return side_by_side([self.kept(name) for name in names])
        return (expand([self.file.load(name) for name in names], self._dtype),)

    def kept(self, name: str) -> Matrix:
        """A matrix as a packed policy keeps it."""
        w = self.in_its_format(self.file.load(name))
        return expand([w], w.dtype) if isinstance(w, jax.Array) else w

    def in_its_format[W](self, w: W) -> W | QuantizedTensor:
        """Blocks as they are, or the affine weights that they are if asked for."""
        wanted = self._policy == "affine" and isinstance(w, GGUFTensor)
        return as_affine(w) if wanted else w

    def stacked(self, *names: str) -> jax.Array:
        """Arrays decoded, as they lie in the file, one after the other on a new dim."""
        return jnp.stack([self.array(name) for name in names])

    def array(self, name: str) -> jax.Array:
        """A tensor of any rank decoded to the dtype of the policy, as it lies."""
        w = self.file.load(name)
        if not isinstance(w, jax.Array):
            return dequantize(w, dtype=self._dtype)
        w = jnp.array(w, self._dtype, copy=True)
        self.file.forget(name)
        return w

    def is_packed(self, name: str) -> bool:
        """Whether it is a packed weight of a folder."""
        return isinstance(self.file, SafetensorsFolder) and self.file.is_packed(name)

    def experts(self, *names: str) -> Float[Array, "e f d"] | QuantizedTensor:
        """`[e, f, d]`, one tensor or one for each expert; a packed policy keeps them
        as in the file."""
        stored = [self.file.load(name) for name in names]
        if self._policy == "fp8_experts" and not are_floats(stored):
            return self.stored_in_8_bits(names[0], stored)
        if any(map(self.is_packed, names)):
            if self._packed and (w := stacked_containers(stored)) is not None:
                return experts_in_tiles(w, gpu_tiles())
            if len(stored) == 1:
                return dequantize(stored[0], dtype=self._dtype)
            return jnp.stack([expanded(w, self._dtype) for w in stored])
        whole = stored[0]
        if isinstance(whole, GGUFTensor) and self._packed:
            return self.with_tiles(whole)
        if not isinstance(whole, jax.Array):
            return whole if self._packed else dequantize(whole, dtype=self._dtype)
        kept = self._packed and jax.default_backend() == "cpu"
        dtype = whole.dtype if kept else self._dtype
        if len(stored) == 1:
            return jnp.array(whole, dtype, copy=True)  # out of the map
        return jnp.stack([jnp.asarray(w, dtype) for w in stored])

    def stored_in_8_bits(
        self, name: str, stored: Sequence[jax.Array | QuantizedTensor]
    ) -> QuantizedTensor:
        """Experts that the file has in 8-bit floats, with a scale for each row."""
        w = stacked_containers(stored)
        if isinstance(w, FP8Tensor) and w.format == "e4m3fn":
            if w.scales.shape[-1] == 1:
                return w
            rows, *sums = rows_of_blocks(w)
            self._requantised.append((sums[0], sums[1]))
            return rows
        raise self.file.error(
            f"tensor {self.file.called(name)} is {stored[0]!r}: weights='fp8_experts' "
            "rounds experts of floats, and takes those in e4m3fn. Rounded again these "
            "would lose more: take 'packed' or 'bf16'"
        )

    def kept_experts(
        self, w: Float[Array, "e f d"]
    ) -> Float[Array, "e f d"] | QuantizedTensor:
        """Decoded experts as the policy keeps them."""
        return in_8_bits(w) if self._policy == "fp8_experts" else w

    def with_tiles(self, experts: GGUFTensor) -> QuantizedTensor:
        """Rows interleaved where the kernels of a GPU read them so."""
        tiled = experts.qtype in UNITS and experts.shape[-2] % ROWS == 0
        if not tiled or experts.qtype not in self._formats:
            return self.in_its_format(experts)
        return in_tiles(experts)

    def mxfp4(
        self, name: str, rows: slice = slice(None)
    ) -> Float[Array, "e f d"] | QuantizedTensor:
        """Some rows of experts in groups of MXFP4, `<name>.blocks` and `.scales`."""
        if self._policy == "fp8_experts":
            raise self.file.error(
                f"tensor {name}.blocks is MXFP4: weights='fp8_experts' rounds experts "
                "of floats, and these would take twice their bytes. Take 'packed'"
            )
        assert isinstance(self.file, SafetensorsFolder)  # the layout is a folder's
        codes = self.file.view(f"{name}.blocks")
        scales = self.file.view(f"{name}.scales", "F8_E8M0")
        codes = codes.reshape(*codes.shape[:2], -1)
        w = MicroscaledTensor(
            jnp.asarray(codes[:, rows]), jnp.asarray(scales[:, rows]), format="mxfp4"
        )
        if not self._packed:
            return dequantize(w, dtype=self._dtype)
        return experts_in_tiles(w, gpu_tiles())

    def table(self, name: str) -> Table:
        """A matrix of which rows are looked up, as it is in the file."""
        return self.file.load(name)

    def table_and_output(self) -> tuple[Table, Matrices]:
        """The embedding, of which rows are looked up, and the product to logits.

        The table stays as it is in the file: only rows that are looked up are decoded;
        a tied output is decoded apart.
        """
        tied = not self.has("output.weight")
        if self._policy == "train":
            output = () if tied else self.matrices("output.weight")
            return self.array("token_embd.weight"), output
        output = self.matrices("token_embd.weight" if tied else "output.weight")
        if tied and isinstance(output[0], InterleavedTensor | AffineTensor):
            return output[0], output
        return self.in_its_format(self.table("token_embd.weight")), output

    @property
    def _dtype(self) -> jnp.dtype:
        narrow = self.numerics["dtype"] == "bfloat16"
        return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)


def are_floats(stored: Sequence[jax.Array | QuantizedTensor]) -> bool:
    return all(isinstance(w, jax.Array) for w in stored)


@jax.jit
def in_8_bits(w: Float[Array, "e f d"]) -> FP8Tensor:
    """Each row by its own largest element: what `moe_ffn_fp8` takes."""
    return quantize_fp8(w, block=(1, 0))


@jax.jit
def as_affine(w: GGUFTensor) -> QuantizedTensor:
    """The very same weights in MLX's affine format, where it holds them."""
    return next(exact_forms(w, "affine"), w)


@functools.partial(jax.jit, static_argnames="dtype")
def expand(
    stored: Sequence[jax.Array | QuantizedTensor], dtype: jnp.dtype
) -> Float[Array, "d f"] | Float[Array, "f d"]:
    """Stored matrices `[f, d]` decoded, side by side; see `Matrix` for the layout."""
    w = jnp.concatenate([expanded(w, dtype) for w in stored])
    return w if dtype != jnp.float32 or w.shape[0] < w.shape[1] else w.T


def expanded(w: jax.Array | QuantizedTensor, dtype: jnp.dtype) -> Float[Array, "... d"]:
    """As an array of this dtype."""
    if isinstance(w, jax.Array):
        return w.astype(dtype)
    return dequantize(w, dtype=dtype)


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
