"""Packed experts of many tokens: the slots of each expert together, where they lie.

The slots are sorted by expert and cut into tiles on the device; grouped_products.py
multiplies each tile with packed weights that it decodes in registers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import compute_capability
from jaxkern.gpu.moe.row_tiles import most_tiles, row_tiles
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.primitives.moe.moe_ffn import FEW_TOKENS
from jaxkern.primitives.quant.interleaved_tensor import ROWS as TILE
from jaxkern.primitives.quant.interleaved_tensor import InterleavedTensor
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.triton.moe.few_slots import refusal_of_operands
from jaxkern.triton.moe.slot_order import slot_order
from jaxkern.triton.quant.block_codes import BYTES, STEP
from jaxkern.triton.quant.grouped_products import (
    grouped_hidden_kernel,
    grouped_result_kernel,
)
from jaxkern.triton.quant.lane_order import in_lane_order
from jaxkern.triton.quant.row_fours import BY_ROWS, PART
from jaxkern.triton.quant.several_products import HOPPER

GROUP = 32  # columns of MXFP4


@dataclasses.dataclass(frozen=True)
class Packed:
    """The experts of a layer in one container.

    Attributes:
      arrays: `[experts, halves, ...]`: tiles, or codes and scales.
      format: a key of `block_codes.BYTES`, or that of row_fours.py.
      columns: of a row.
    """

    arrays: tuple[jax.Array, ...]
    format: str
    columns: int

    @classmethod
    def of_tiles(cls, tiles: jax.Array, qtype: str, columns: int) -> "Packed":
        return cls((tiles,), qtype, columns)

    @classmethod
    def of_rows(cls, codes: jax.Array, scales: jax.Array) -> "Packed":
        return cls((codes, scales), BY_ROWS, codes.shape[-1] * 2)

    @classmethod
    def of(cls, w: Any, columns: int) -> "Packed":
        """Of a container."""
        if isinstance(w, InterleavedTensor):
            return cls.of_tiles(w.tiles, w.qtype, columns)
        return cls.of_rows(w.codes, w.scales)

    @property
    def experts(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def tiles(self) -> int:
        """Of 16 rows, of a half."""
        rows = self.arrays[0].shape[-2]
        return rows // TILE if self.format == BY_ROWS else rows

    @property
    def sizes(self) -> dict[str, Any]:
        """What both kernels know of them."""
        tile_bytes = self.arrays[0].shape[-1]
        groups = tile_bytes // (TILE * BYTES.get(self.format, 1))
        if self.format == BY_ROWS:
            groups, tile_bytes = self.columns // GROUP, TILE * tile_bytes
        return {
            "WIDTH": self.width,
            "STEPS": -(-self.columns // STEP),
            "GROUPS": groups,
            "TILES": self.tiles,
            "TILE_PAIRS": tile_bytes // 8,
            "FORMAT": self.format,
            "EXPERTS": self.experts,
        }

    @property
    def width(self) -> int:
        """Of activations."""
        unit = PART if self.format == BY_ROWS else 1
        return -(-self.columns // unit) * unit

    def in_order(self, x: jax.Array) -> jax.Array:
        """x `[rows, columns]` as `[rows, width]` in the order of the lanes."""
        return in_lane_order(x, PART // 8 if self.format == BY_ROWS else 2)


def takes(w: Any) -> bool:
    """Whether this GPU multiplies many tokens with experts of this container."""
    if compute_capability() < HOPPER:
        return False
    if isinstance(w, InterleavedTensor):
        return w.qtype in BYTES
    mxfp4 = isinstance(w, MicroscaledTensor) and w.format == "mxfp4"
    return mxfp4 and w.shape[-2] % TILE == 0


def refusal_of_many(x: Any, ids: Any, shared: Any, **named: Any) -> str | None:
    """Why no kernel multiplies many tokens, or None; `shared` is None or refused."""
    if reason := refusal_of_operands(x, ids, **named):
        return reason
    if compute_capability() < HOPPER:
        return f"over {FEW_TOKENS} tokens need compute capability {HOPPER / 10}"
    return None if shared is None else f"`shared` beside over {FEW_TOKENS} tokens"


def columns_of(slots: int, experts: int) -> int:
    """Slots of a program: what was fastest at 2, 8, 16, 64, 128 and 512 an expert."""
    mean = -(-slots // experts)
    return 32 if mean <= 32 else 64 if mean <= 256 else 128


def warps_of(columns: int) -> int:
    return 4 if columns == 32 else 8


def tiles_of(ids: jax.Array, experts: int, columns: int) -> dict[str, jax.Array]:
    """Sorted slots and the table of their tiles, as operands of a kernel."""
    order, sizes = slot_order(ids, experts)
    table, count = row_tiles(sizes, ids.size, columns)
    return {"order_ptr": order, "table_ptr": table, "count_ptr": count}


def pointers_of(name: str, w: Packed | None) -> dict[str, jax.Array | None]:
    arrays: Sequence[Any] = () if w is None else w.arrays
    codes, scales = (*arrays, None, None)[:2]
    return {f"{name}_ptr": codes, f"{name}_scales_ptr": scales}


def grid_of(slots: int, w: Packed, columns: int, tiles: int) -> tuple[int, int]:
    """(programs, how many of them have the same slots)."""
    blocks = -(-w.tiles // tiles)
    return most_tiles(slots, w.experts, columns) * blocks, blocks


def program_of(columns: int) -> dict[str, Any]:
    """Of so many slots: two programs a multiprocessor where their slabs allow it."""
    found = {"COLUMNS": columns, "num_warps": warps_of(columns)}
    return found | {"max_registers": 128 if columns <= 64 else None}


def grouped_hidden(
    x: jax.Array,
    ids: jax.Array,
    gate: Packed,
    up: Packed | None,
    gate_bias: jax.Array | None,
    up_bias: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """`[..., k, f]` of x `[..., d]` and ids `[..., k]`; without `up` gate has both."""
    f = gate.tiles * TILE
    columns = columns_of(ids.size, gate.experts)
    programs, blocks = grid_of(ids.size, gate, columns, warps_of(columns) // 2)
    tokens = x.reshape(-1, x.shape[-1])
    [y] = sparse_call(
        grouped_hidden_kernel,
        (programs,),
        {"x_ptr": gate.in_order(tokens)}
        | tiles_of(ids, gate.experts, columns)
        | pointers_of("gate", gate)
        | pointers_of("up", up)
        | {"gate_bias_ptr": gate_bias, "up_bias_ptr": up_bias},
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape, f), x.dtype)},
        gate.sizes
        | {name.upper(): value for name, value in options.items()}
        | {"TOP_K": ids.shape[-1], "HALVES": 1 if up is not None else 2}
        | {"BLOCKS": blocks}
        | program_of(columns),
    )
    assert y is not None
    return y


def grouped_sum(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    down: Packed,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """`[..., f]` of x `[..., k, d]`, ids and weights `[..., k]`."""
    f = down.tiles * TILE
    columns = columns_of(ids.size, down.experts)
    programs, blocks = grid_of(ids.size, down, columns, warps_of(columns))
    [slots] = sparse_call(
        grouped_result_kernel,
        (programs,),
        {"x_ptr": down.in_order(x.reshape(ids.size, -1))}
        | tiles_of(ids, down.experts, columns)
        | pointers_of("down", down)
        | {"bias_ptr": bias},
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape, f), jnp.float32)},
        down.sizes | {"BLOCKS": blocks} | program_of(columns),
    )
    assert slots is not None
    known = (ids >= 0) & (ids < down.experts)
    by_expert = jnp.where(known, weights.astype(jnp.float32), 0.0)
    y = (by_expert[..., None] * slots).sum(-2)
    if residual is not None:
        y = y + residual.reshape(y.shape).astype(jnp.float32)
    return y.astype(x.dtype)
