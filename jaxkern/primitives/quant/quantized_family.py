"""The primitives of a container from one declaration: weights, product, rows, experts.

A container says what its arrays are, how they lie and how they decode:

    INT = QuantizedFamily(
        arrays={
            "codes": Integer[Array, "f bytes"],
            "scales": Float[Array, "f groups"],
            "zeros": Float[Array, "f groups"],
        },
        optional=("zeros",),
        layout=("bits", "group_size", "signed"),  # static fields of the container
        decode=decode_int,  # (*arrays, **layout, dtype=) -> [..., d]
        width=int_width,  # (op, *arrays, **layout) -> d; refuses what does not fit
        whole=("d", "bytes", "groups"),  # a group spans all three
    )
    int_matmul_p = INT.matmul("int_matmul", __name__)
    QUANTIZED_MATMUL[IntTensor] = INT.reader(int_matmul_p, "compute_dtype")

The first dim of each array is the row; an op puts its own in that place:

    dequantize   arrays `[... bytes]` -> `[... d]`
    matmul       x `[... d]`, arrays `[f bytes]` -> `[... f]`
    embedding    ids `[...]`, arrays `[v bytes]` -> `[... d]`
    matmul_id    x `[... d]`, ids `[... k]`, arrays `[e f bytes]` -> `[... k f]`
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Integer

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.decoded_products import (
    decoded_product,
    decoded_rows,
    routed_product,
    routed_product_transpose,
)


@dataclass(frozen=True)
class QuantizedFamily:
    """What the ops of one container have in common; each method declares one of them.

    `name` is that of the primitive, `module` that of the file which declares it.

    Attributes:
      arrays: its arrays in order, with their dims `[row, ...]`.
      layout: names of its static fields; options of every op.
      optional: names of arrays that may be None.
      decode: `(*arrays that are there, **layout, dtype=) -> [..., d]`.
      width: `(op, *arrays, **layout) -> d`, or None where the dims say it all.
      whole: dims that one group of weights spans.
      columns: dims of x and of a decoded row.
      rows: dims of a product; of two the last one are the rows of a tile.
      matrix: a group spans rows too, so weights are decoded by whole matrices.
      arrays_of: the arrays of a container, where they are not its fields themselves.
    """

    arrays: Mapping[str, Any]
    layout: tuple[str, ...]
    decode: Callable[..., Array]
    whole: tuple[str, ...]
    width: Callable[..., int] | None = None
    optional: tuple[str, ...] = ()
    columns: str = "d"
    rows: str = "f"
    matrix: bool = False
    arrays_of: Callable[[Any], Sequence[Array | None]] | None = None

    def dequantize(
        self,
        name: str,
        module: str,
        *,
        options: tuple[str, ...] = (),
        bwd: Callable | None = None,
        whole: tuple[str, ...] | None = None,
    ) -> KernelPrimitive:
        """The weights in the dtype `dtype`; `options` of its own go to `decode`."""

        def weights(*arrays, dtype, **options):
            self.checked_width(name, arrays, options)
            return self.decode(*present(arrays), **options, dtype=dtype)

        def by_rows(dims: str) -> str:
            return f"... {dims if self.matrix else ' '.join(dims.split()[1:])}"

        arrays = self.placed(by_rows)
        rows = f"{self.rows} " if self.matrix else ""
        result = Float[Array, f"... {rows}{self.columns}"]
        names = (*self.layout, "dtype", *options)
        reference = declared(weights, name, module, arrays, names, result)
        whole = self.whole if whole is None else whole
        return kernel_primitive(reference, bwd=bwd, replicated=whole)

    def matmul(
        self,
        name: str,
        module: str,
        *,
        options: tuple[str, ...] = (),
        bwd: Callable | None = None,
    ) -> KernelPrimitive:
        """y = x w^T, linear in x unless a `bwd` gives gradients of its own."""

        def product(x, *arrays, compute_dtype, **options):
            self.check_columns(name, x, arrays, options)
            decode = functools.partial(self.decode, **options)
            y = decoded_product(x, present(arrays), decode, 1, compute_dtype)
            return self.split_rows(y)

        def transpose(*operands, compute_dtype, **options):
            *arrays, dy = operands
            decode = functools.partial(self.decode, **options)
            dy = self.merged_rows(dy)
            return decoded_product(dy, present(arrays), decode, 0, compute_dtype)

        arrays = self.placed(lambda dims: dims)
        x, y = (Float[Array, f"... {dims}"] for dims in (self.columns, self.rows))
        names = (*self.layout, "compute_dtype", *options)
        reference = declared(product, name, module, {"x": x, **arrays}, names, y)
        if bwd is not None:
            return kernel_primitive(reference, bwd=bwd, replicated=self.whole)
        arrays = {**arrays, "dy": y}
        bwd = declared(transpose, f"{name}_bwd", module, arrays, names, x)
        return kernel_primitive(
            reference, bwd=bwd, linear=("x",), replicated=self.whole
        )

    def embedding(
        self, name: str, module: str, *, decode: Callable[..., Array] | None = None
    ) -> KernelPrimitive:
        """Rows w[ids]; `decode` for a container that decodes one row in another way."""
        decode_row = decode or self.decode

        def rows(ids, *arrays, dtype, **options):
            self.checked_width(name, arrays, options)
            decode = functools.partial(decode_row, **options)
            return decoded_rows(ids, present(arrays), decode, dtype)

        def by_id(dims: str) -> str:
            return " ".join(("v", *dims.split()[1:]))

        operands = {"ids": Integer[Array, "..."], **self.placed(by_id)}
        result = Float[Array, f"... {self.columns}"]
        names = (*self.layout, "dtype")
        reference = declared(rows, name, module, operands, names, result)
        # an id may name any row
        return kernel_primitive(reference, replicated=("v", *self.whole))

    def matmul_id(self, name: str, module: str) -> KernelPrimitive:
        """y[..., k, :] = w[ids[..., k]] x, linear in x."""

        def product(x, ids, *arrays, compute_dtype, **options):
            self.check_columns(name, x, arrays, options)
            decode = functools.partial(self.decode, **options)
            y = routed_product(x, ids, present(arrays), decode, compute_dtype)
            return self.split_rows(y)

        def transpose(ids, *operands, compute_dtype, **options):
            *arrays, dy = operands
            decode = functools.partial(self.decode, **options)
            dy, arrays = self.merged_rows(dy), present(arrays)
            return routed_product_transpose(dy, ids, arrays, decode, compute_dtype)

        ids = {"ids": Integer[Array, "... k"]}
        arrays = {**ids, **self.placed(lambda dims: f"e {dims}")}
        x, y = (
            Float[Array, f"... {dims}"] for dims in (self.columns, f"k {self.rows}")
        )
        names = (*self.layout, "compute_dtype")
        reference = declared(product, name, module, {"x": x, **arrays}, names, y)
        arrays = {**arrays, "dy": y}
        return kernel_primitive(
            reference,
            bwd=declared(transpose, f"{name}_bwd", module, arrays, names, x),
            linear=("x",),
            replicated=("e", "k", *self.whole),  # an id may name any expert
        )

    def reader(self, p: KernelPrimitive, option: str) -> Callable:
        """`p` as `dequantize` and the others call it: `(*operands, w, option)`."""

        def read(*arguments):
            *operands, w, value = arguments
            options = {**self.layout_of(w), option: value}
            return p(*operands, *self.read(w), **options)

        return read

    def read(self, w: Any) -> Sequence[Array | None]:
        """The arrays of a container, in order."""
        if self.arrays_of is not None:
            return self.arrays_of(w)
        return [getattr(w, name) for name in self.arrays]

    def layout_of(self, w: Any) -> dict[str, Any]:
        """The static fields of a container."""
        return {name: getattr(w, name) for name in self.layout}

    def placed(self, place: Callable[[str], str]) -> dict[str, Any]:
        """The annotations of the arrays, their dims changed."""
        placed = {n: a.dtype[Array, place(a.dim_str)] for n, a in self.arrays.items()}
        return {n: a | None if n in self.optional else a for n, a in placed.items()}

    def checked_width(
        self, op: str, arrays: Sequence[Array | None], options: Mapping[str, Any]
    ) -> int | None:
        """Weights in a row, if the arrays know it; refuses arrays that do not fit."""
        layout = {name: options[name] for name in self.layout}
        return None if self.width is None else self.width(op, *arrays, **layout)

    def check_columns(
        self,
        op: str,
        x: Array,
        arrays: Sequence[Array | None],
        options: Mapping[str, Any],
    ) -> None:
        """Raises TypeError unless `x` is as wide as the weights."""
        d = self.checked_width(op, arrays, options)
        if d is not None and x.shape[-1] != d:
            raise TypeError(
                f"{op}: `x` must be [..., {d}]: dim `d` is {x.shape[-1]} in `x` but "
                f"{d} in `w`."
            )

    def split_rows(self, y: Array) -> Array:
        """The last dim f of a product as the dims `rows`."""
        if " " not in self.rows:
            return y
        tile = int(self.rows.split()[1])
        return y.reshape(*y.shape[:-1], y.shape[-1] // tile, tile)

    def merged_rows(self, dy: Array) -> Array:
        """The inverse of `split_rows`."""
        if " " not in self.rows:
            return dy
        return dy.reshape(*dy.shape[:-2], dy.shape[-2] * dy.shape[-1])


def declared(
    fn: Callable,
    name: str,
    module: str,
    operands: Mapping[str, Any],
    options: Sequence[str],
    result: Any,
) -> Callable:
    """`fn` as a reference: with the name, the operands and the options of its op."""
    fn.__name__ = fn.__qualname__ = f"{name}_reference"
    fn.__module__ = module
    fn.__annotations__ = {**operands, "return": result}
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *(inspect.Parameter(n, kinds[0], annotation=a) for n, a in operands.items()),
        *(inspect.Parameter(n, kinds[1]) for n in options),
    ]
    signature = inspect.Signature(parameters, return_annotation=result)
    setattr(fn, "__signature__", signature)  # noqa: B010, functions have no such field
    return fn


def present(arrays: Sequence[Array | None]) -> list[Array]:
    """The arrays that are there."""
    return [a for a in arrays if a is not None]
