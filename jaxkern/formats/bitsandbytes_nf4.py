"""`quantization_config` of bitsandbytes: weights in 4-bit normal floats.

A module has `weight`, bytes of two codes each in the order of the weights, `absmax` of
its groups, a byte each where they are quantised once more (`nested_absmax`), the levels
(`quant_map`), and a quant state, JSON with the shape: all named `weight.<that>`.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.packed_matrix import Arrays, PackedMatrix
from jaxkern.formats.packing import Packing, known, names_of
from jaxkern.primitives.quant.nf4 import nf4_from_bitsandbytes
from jaxkern.primitives.quant.nf4_tensor import (
    LEVELS,
    OUTER_SIZE,
    NF4Tensor,
    dynamic_levels,
)

STATE = "quant_state.bitsandbytes__nf4"
LONGEST_STATE = 2**16  # bytes; usual are 300


def read_bitsandbytes(keys: ArchitectureKeys, packing: Packing) -> None:
    """The weights that have a quant state; those of 8 bits are refused."""
    if not keys.flag("load_in_4bit", False) or keys.flag("load_in_8bit", False):
        raise keys.error("load_in_4bit", "expected weights of 4 bits")
    known(keys, "bnb_4bit_quant_type", "nf4")
    known(keys, "bnb_4bit_quant_storage", "uint8")
    for name in packing.folder.tensors:
        if name.endswith(f".{STATE}"):
            add_weight(packing, name.removesuffix(f".{STATE}"))
    packing.refuse(names_of(keys, "llm_int8_skip_modules"))


def add_weight(packing: Packing, weight: str) -> None:
    """A weight by its quant state, its parts checked."""
    state = state_of(packing, f"{weight}.{STATE}")
    f, d = state["shape"]
    size, nested = state["blocksize"], "nested_blocksize" in state
    if d % size or size % 2:
        raise packing.folder.error(
            f"tensor {weight} has groups of {size} that do not divide a row of {d}"
        )
    groups, count = f * d // size, f * d // 2
    parts = {
        "weight": packing.part(weight, ("U8",), (count, 1), (count,), (1, count)),
        "absmax": packing.part(
            f"{weight}.absmax", ("U8",) if nested else ("F32",), (groups,)
        ),
        "quant_map": packing.part(f"{weight}.quant_map", ("F32",), (16,)),
    }
    if nested:
        outer = (-(-groups // OUTER_SIZE),)
        for name, shape in (("nested_absmax", outer), ("nested_quant_map", (256,))):
            parts[name] = packing.part(f"{weight}.{name}", ("F32",), shape)
    container = partial(
        from_bitsandbytes, shape=(f, d), size=size, offset=state.get("nested_offset", 0)
    )
    packing.add(weight, PackedMatrix((f, d), "nf4", parts, container))
    packing.taken.add(f"{weight}.{STATE}")


def state_of(packing: Packing, name: str) -> Mapping[str, Any]:
    """The JSON of a quant state, checked."""
    info, folder = packing.folder.tensors[name], packing.folder
    if info.qtype != "U8" or len(info.shape) != 1 or info.nbytes > LONGEST_STATE:
        raise folder.error(f"tensor {name} is {info.qtype} {info.shape}, expected JSON")
    try:
        state = json.loads(folder.view(name).tobytes())
        shape, size = state["shape"], state["blocksize"]
        fits = [type(n) for n in (*shape, size)] == [int] * 3 and min(*shape, size) > 0
        fits &= state["quant_type"] == "nf4"
        fits &= state.get("nested_blocksize", OUTER_SIZE) == OUTER_SIZE
        fits &= bool(np.isfinite(float(state.get("nested_offset", 0.0))))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise folder.error(f"tensor {name} is no quant state: {error!r}") from None
    if not fits:
        raise folder.error(
            f"tensor {name} says {state}, expected nf4, a shape of two dims, and "
            f"scales in blocks of {OUTER_SIZE}"
        )
    return state


def from_bitsandbytes(
    arrays: Arrays, *, shape: tuple[int, int], size: int, offset: float
) -> NF4Tensor:
    """The container; ValueError where the codes mean other numbers."""
    maps = {"quant_map": np.array(LEVELS), "nested_quant_map": dynamic_levels()}
    for name, levels in maps.items():
        found = arrays.get(name)
        if found is not None and not np.allclose(found, levels, rtol=0, atol=1e-6):
            raise ValueError(f"has a {name} of other levels")
    nested = arrays.get("nested_absmax")
    return nf4_from_bitsandbytes(
        jnp.asarray(arrays["weight"]),
        jnp.asarray(arrays["absmax"]),
        shape,
        nested_absmax=None if nested is None else jnp.asarray(nested),
        nested_offset=float(offset),
        group_size=size,
    )
