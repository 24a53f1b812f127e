"""`PackedMatrix`: a weight that a folder stores in several tensors, codes and scales.

Codes of 4 bits lie in words of 32, the lowest first, so the bytes of the words are
already those of an `IntTensor` where a word runs along the inputs. No number is rounded
on the way. Of 8-bit floats the arrays here are the codes, uint8.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.import_int4 import AWQ_ORDER
from jaxkern.primitives.quant.int_tensor import IntTensor
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PackedMatrix:
    """One weight in some tensors of a folder.

    Attributes:
      shape: of the weights, `[f, d]`; of stacked experts `[e, f, d]`.
      kind: "int4", "int8", "fp8", "mxfp8", "nvfp4", "mxfp4" or "nf4".
      parts: names in the folder, by what each is.
      container: of their arrays. ValueError if their values do not fit together.
      means: of parts in bytes the dtype that these stand for, such as "F8_E8M0".
    """

    shape: tuple[int, ...]
    kind: str
    parts: Mapping[str, str]
    container: Callable[[Arrays], QuantizedTensor]
    means: Mapping[str, str] = field(default_factory=dict)

    def read(self, view: Callable[[str, str | None], np.ndarray]) -> QuantizedTensor:
        """The weight; `view` reads a tensor by its name and what its bytes mean."""
        return self.container(
            {
                part: view(name, self.means.get(part))
                for part, name in self.parts.items()
            }
        )


def codes_in_words(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of 4 or 8 bits of `[r, w]` int32: `[r, w * 32 / bits]` uint8."""
    bytes_of = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return bytes_of
    return np.stack([bytes_of & 15, bytes_of >> 4], -1).reshape(len(words), -1)


def in_bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[f, d]`, one a byte, as `IntTensor` holds them."""
    return codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


def from_words(
    words: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    groups: np.ndarray | None,
    *,
    d: int,
    bits: int,
    group_size: int,
) -> IntTensor:
    """`[f, d]` whose words run along the inputs.

    Args:
      words: `[f, ceil(d bits / 32)]` int32.
      scales: `[f, groups]`.
      zeros: the same shape, codes; None for 2**(bits - 1).
      groups: `[d]`, the group of each input, or None for runs.
    """
    order = None if groups is None else order_of(groups, group_size, scales.shape[1])
    if order is None:
        codes = np.ascontiguousarray(words).view(np.uint8)[:, : d * bits // 8]
    else:
        codes = in_bytes(codes_in_words(words, bits)[:, order], bits)
    return IntTensor(
        jnp.asarray(codes),
        jnp.asarray(np.ascontiguousarray(scales)),
        None if zeros is None else jnp.asarray(zeros.astype(scales.dtype)),
        None if order is None else jnp.asarray(order),
        bits=bits,
        group_size=group_size,
        signed=False,
    )


def order_of(groups: np.ndarray, group_size: int, count: int) -> np.ndarray | None:
    """The inputs sorted by their groups; None where they are so already."""
    if groups.size and not 0 <= groups.min() <= groups.max() < count:
        raise ValueError(f"names groups {groups.min()} to {groups.max()} of {count}")
    runs = np.arange(groups.size) // group_size
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[order], runs):
        raise ValueError(f"must name each of {count} groups {group_size} times")
    return None if np.array_equal(groups, runs) else order


def from_gptq(
    arrays: Arrays, *, bits: int, group_size: int, zeros_less_one: bool
) -> IntTensor:
    """Words down the inputs of `[d, f]`, zeros along the outputs, as GPTQ has them."""
    zeros = codes_in_words(arrays["qzeros"], bits)
    zeros = (zeros + np.uint8(zeros_less_one)) & np.uint8(2**bits - 1)
    words = arrays["qweight"].T
    return from_words(
        words,
        arrays["scales"].T,
        zeros.T,
        arrays.get("g_idx"),
        d=words.shape[1] * 32 // bits,
        bits=bits,
        group_size=group_size,
    )


def from_awq(arrays: Arrays, *, group_size: int) -> IntTensor:
    """Words along the outputs of `[d, f]`, eight of them in AWQ's order ("gemm")."""
    place = np.argsort(AWQ_ORDER)

    def outputs(words: np.ndarray) -> np.ndarray:
        eights = codes_in_words(words, 4).reshape(len(words), -1, 8)
        return eights[..., place].reshape(len(words), -1)

    scales = np.ascontiguousarray(arrays["scales"].T)
    return IntTensor(
        jnp.asarray(in_bytes(outputs(arrays["qweight"]).T, 4)),
        jnp.asarray(scales),
        jnp.asarray(outputs(arrays["qzeros"]).T.astype(scales.dtype)),
        bits=4,
        group_size=group_size,
        signed=False,
    )


def from_int8(arrays: Arrays) -> IntTensor:
    """Signed bytes with a scale for each row, or one for all."""
    codes, scales = arrays["weight"], arrays["weight_scale"]
    rows = (codes.shape[0], 1)
    zeros = arrays.get("weight_zero_point")
    if zeros is not None:
        zeros = np.broadcast_to(zeros.reshape(-1, 1), rows).astype(scales.dtype)
    return IntTensor(
        jnp.asarray(codes),
        jnp.asarray(np.broadcast_to(scales.reshape(-1, 1), rows)),
        None if zeros is None else jnp.asarray(zeros),
        bits=8,
        group_size=codes.shape[1],
        signed=True,
    )


def from_fp8(arrays: Arrays, *, block: tuple[int, int]) -> FP8Tensor:
    """8-bit floats with a scale for each block; one alone may have no dims.

    Scales in uint8 are powers of two.
    """
    codes, scales = arrays["codes"], arrays["scales"]
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if block == (0, 0):
        scales = scales.reshape(*codes.shape[:-2], 1, 1)
    return FP8Tensor(jnp.asarray(codes), jnp.asarray(scales), block, "e4m3fn")


def from_microscaled(arrays: Arrays, *, form: str) -> MicroscaledTensor:
    """Small floats; `divisor` is what the scales of NVFP4 were multiplied by."""
    factor, divisor = None, arrays.get("divisor")
    if divisor is not None:
        if prod(divisor.shape) != 1 or not 0 < float(divisor.reshape(())) < np.inf:
            raise ValueError("has a global scale that is no positive number")
        factor = jnp.asarray(1 / divisor.reshape(()).astype(np.float32))
    codes, scales = (jnp.asarray(arrays[part]) for part in ("codes", "scales"))
    return MicroscaledTensor(codes, scales, factor, form)
