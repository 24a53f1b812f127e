"""One declaration gives every op of a container its dims, options and refusals.

The tests of the containers check what their ops compute; none of them would see an
operand that was declared with another dim, which is what sharding and batching go by.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int8

from jaxkern.primitives.declared_dims import annotated
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.primitives.quant.int_matmul import INT
from jaxkern.primitives.quant.quantized_family import QuantizedFamily

DECLARED = [
    "dequantize: ... row_bytes -> ... d",
    "quantized_matmul: ... d, f row_bytes -> ... f",
    "quantized_embedding: ..., v row_bytes -> ... d",
    "quantized_matmul_id: ... d, ... k, e f row_bytes -> ... k f",
    "dequantize_int: ... bytes, ... groups, ... groups -> ... d",
    "int_matmul: ... d, f bytes, f groups, f groups -> ... f",
    "int_embedding: ..., v bytes, v groups, v groups -> ... d",
    "int_matmul_id: ... d, ... k, e f bytes, e f groups, e f groups -> ... k f",
    "dequantize_affine: ... words, ... groups, ... groups -> ... d",
    "affine_matmul: ... d, f words, f groups, f groups -> ... f",
    "interleaved_matmul: ... d, u tile_bytes -> ... u 16",
    "interleaved_matmul_id: ... d, ... k, e u tile_bytes -> ... k u 16",
    "dequantize_fp8: ... nf*bf nd*bd, ... nf nd -> ... nf*bf nd*bd",
    "fp8_matmul: ... nd*bd, nf*bf nd*bd, nf nd -> ... nf*bf",
    "fp8_embedding: ..., v nd*bd, v nd -> ... nd*bd",
    "dequantize_microscaled: ... n*c, ... n, ... -> ... n*g",
    "microscaled_matmul: ... n*g, f n*c, f n, f -> ... f",
    "microscaled_matmul_id: ... n*g, ... k, e f n*c, e f n, e f -> ... k f",
    "microscaled_embedding: ..., v n*c, v n, v -> ... n*g",
]


@pytest.mark.parametrize("declared", DECLARED)
def test_declared_dims(declared):
    assert repr(REGISTRY[declared.split(":")[0]]) == declared


@pytest.mark.parametrize("op", ["int_matmul", "microscaled_matmul", "fp8_matmul"])
def test_transpose_takes_what_is_not_linear(op):
    p = REGISTRY[op]
    assert p.linear == ("x",)
    names = [a.name for a in p.operands]
    assert [a.name for a in p.bwd.operands] == [*names[1:], "dy"]


def test_width_is_refused_in_the_name_of_the_op():
    def decode(codes, scales, *, dtype):
        return (codes * scales).astype(dtype)

    family = QuantizedFamily(
        arrays={"codes": Int8[Array, "f d"], "scales": Float[Array, "f 1"]},
        layout=(),
        decode=decode,
        width=lambda op, codes, scales: codes.shape[-1],
        whole=("d",),
    )
    p = family.matmul("rows_of_bytes_matmul", __name__)
    try:
        codes = jnp.asarray(np.arange(6).reshape(2, 3), jnp.int8)
        scales = jnp.asarray([[2.0], [0.5]])
        y = p(jnp.ones((4, 3)), codes, scales, compute_dtype=None)
        np.testing.assert_array_equal(y, np.tile([6.0, 6.0], (4, 1)))
        narrow = {"codes": codes[:, :2], "scales": scales}
        with pytest.raises(TypeError, match=r"dim `d` is 3 in `x` but 2 in"):
            p(jnp.ones((4, 3)), *narrow.values(), compute_dtype=None)
        with pytest.raises(TypeError, match=r"wide: `x` must be \[\.\.\., 2\]"):
            family.check_columns("wide", jnp.ones(3), list(narrow.values()), {})
    finally:  # the checks of every declared op would ask for its cases
        del REGISTRY[p.name]


def test_an_op_places_the_arrays_and_keeps_what_may_be_absent():
    placed = INT.placed(lambda dims: f"e {dims}")
    zeros = annotated(INT.placed, "zeros", placed["zeros"])
    codes = annotated(INT.placed, "codes", placed["codes"])
    assert zeros.dims == ("e", "f", "groups")
    assert zeros.is_float and zeros.optional
    assert codes.kind == "Integer" and not codes.optional
