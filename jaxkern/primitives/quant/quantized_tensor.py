"""What every container of quantised weights offers, and the check that asks for one.

A format is a frozen dataclass of arrays (a pytree, its options in the static
structure) that is a `QuantizedTensor`, a `QuantizedFamily` that declares its
primitives, and one line each that names the functions that read it:

    DEQUANTIZE[MyTensor] = my_dequantize  # (w, dtype) -> [..., d]
    QUANTIZED_MATMUL[MyTensor] = my_matmul  # (x, w, compute_dtype) -> [..., f]
    QUANTIZED_EMBEDDING[MyTensor] = my_embedding  # (ids, w, dtype) -> [..., d]
    QUANTIZED_MATMUL_ID[MyTensor] = my_matmul_id  # (x, ids, w, compute_dtype)
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class QuantizedTensor(Protocol):
    """A weight of shape `[..., d]`, packed along its last dim.

    Not an array on purpose: arithmetic must say where it decodes.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights. Raises TypeError if the arrays do not fit together."""
        ...

    @property
    def ndim(self) -> int:
        return jax.tree.leaves(self)[0].ndim  # codes are the first array of all

    @property
    def nbytes(self) -> int:
        """Bytes held, of all arrays."""
        return sum(a.nbytes for a in jax.tree.leaves(self))

    def __getitem__(self, index: Any, /) -> "QuantizedTensor":
        """Index leading dims: `stack[layer]`, `experts[ids]`, `rows[2:5]`.

        `w[...]` is w itself, as Flax reads what a variable holds.
        """
        ...


def reader_of(
    op: str,
    readers: Mapping[type, Callable],
    w: QuantizedTensor,
    *,
    ndim: int | None = None,
) -> Callable:
    """The function that reads `w`; TypeError if there is none, or not `ndim` dims."""
    if type(w) not in readers:
        known = ", ".join(container.__name__ for container in readers)
        raise TypeError(
            f"{op}: `w` must be a quantised tensor ({known}), got {type(w).__name__}."
        )
    shape = w.shape  # refuses arrays that do not fit together
    if ndim is not None and len(shape) != ndim:
        raise TypeError(
            f"{op}: `w` must have {ndim} dims, got {shape}. Use jax.vmap for a stack."
        )
    return readers[type(w)]


def check_leading_index(w: QuantizedTensor, index: Any) -> None:
    """Raises TypeError if an index would reach the packed last dim."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) >= w.ndim or any(i is ... for i in indices):
        raise TypeError(
            f"{type(w).__name__}: only the {w.ndim - 1} leading dims of {w.shape} can "
            "be indexed, the last one is packed. Use dequantize(w)[...] instead."
        )


def repr_of(w: Any, kind: str) -> str:
    """Its kind and shape; where JAX or the user has put other things than arrays into
    it, shardings, say, or None, these."""
    try:
        inside = f"shape={w.shape}"
    except (AttributeError, TypeError, ValueError):
        static = {f.name for f in dataclasses.fields(w) if f.metadata.get("static")}
        inside = ", ".join(f"{k}={v!r}" for k, v in vars(w).items() if k not in static)
    return f"{type(w).__name__}({kind}, {inside})"


def float_dtype(op: str, dtype: DTypeLike) -> jnp.dtype:
    """`dtype` as a NumPy dtype; TypeError if it is not a float."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{op}: `dtype` must be a float dtype, got {jnp.dtype(dtype)}.")
    return jnp.dtype(dtype)
