"""Few numbers in StableHLO's own interpreter, which compiles nothing.

To XLA a program of thousands of equations costs seconds, whatever the sizes of its
arrays. The interpreter walks through it in hundredths of one. It ends the process where
it meets what it does not know, so a program is looked through first.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.extend.mlir.passmanager import PassManager

OPERATIONS = frozenset(
    """abs add and atan2 bitcast_convert broadcast_in_dim case cbrt ceil clamp compare
    concatenate constant convert convolution cosine count_leading_zeros divide
    dot_general dynamic_slice dynamic_update_slice exponential exponential_minus_one
    floor gather get_tuple_element if iota is_finite log log_plus_one logistic maximum
    minimum multiply negate not optimization_barrier or pad popcnt power reduce
    reduce_precision reduce_window remainder reshape return reverse
    round_nearest_afz round_nearest_even rsqrt scatter select select_and_scatter
    shift_left shift_right_arithmetic shift_right_logical sign sine slice sort sqrt
    subtract tan tanh transpose tuple while xor""".split()
)
# What is made of the former first.
COMPOSED = frozenset(
    """acos acosh asin asinh atan atanh cosh erf erf_inv erfc sinh square tan
    top_k""".split()
)
KNOWN = (
    {"builtin.module", "func.func", "func.call", "func.return"}
    | {f"stablehlo.{name}" for name in OPERATIONS}
    | {f"chlo.{name}" for name in COMPOSED}
)
# Of known dims, no complex numbers.
TENSOR = re.compile(r"tensor<(\d+x)*(bf16|f16|f32|f64|f8E4M3FN|f8E5M2|u?i\d+)>")
EMPTY = re.compile(r"tensor<(\d+x)*0x")
OF_WINDOWS = {  # which it refuses where an operand is empty
    f"stablehlo.{name}"
    for name in ("convolution", "dot_general", "reduce_window", "select_and_scatter")
}


def evaluated(f: Callable, *operands: Any) -> Any:
    """`f(*operands)` for few numbers, without code being made of `f` where possible.

    `f` is traced and lowered as ever: to it the operands are abstract. What it is
    lowered to is interpreted, in a tenth of the time that XLA takes to compile it. If
    the interpreter lacks something, such as a kernel, XLA compiles it with the operands
    as constants.
    """
    inner = jax.jit(f)
    shapes, tree = jax.tree.flatten(jax.eval_shape(inner, *operands))
    lowered = jax.jit(lambda: jax.tree.map(as_bits, inner(*operands))).lower()
    results = interpreted(lowered.compiler_ir())
    if results is None:
        results = jax.tree.leaves(lowered.compile()())
    pairs = zip(results, shapes, strict=True)
    return tree.unflatten([np.asarray(y).view(s.dtype) for y, s in pairs])


def as_bits(y: jax.Array) -> jax.Array:
    """y, but of bfloat16, which MLIR does not hand to NumPy, its bits."""
    return jax.lax.bitcast_convert_type(y, np.uint16) if y.dtype == jnp.bfloat16 else y


def evaluate_each(f: Callable, calls: Sequence[Sequence]) -> list:
    """The results of several calls of `f`, as `evaluated` has them.

    Those with an empty array are a program of their own.
    """
    inner = jax.jit(f)  # traced once for all calls of the same shapes
    results: dict[int, Any] = {}
    empty = [any(x.size == 0 for x in jax.tree.leaves(call)) for call in calls]
    for group in sorted(set(empty)):
        at = [k for k, is_empty in enumerate(empty) if is_empty is group]
        found = evaluated(
            lambda calls: [inner(*operands) for operands in calls],
            [calls[k] for k in at],
        )
        results |= zip(at, found, strict=True)
    return [results[k] for k in range(len(calls))]


def interpreted(module: Any) -> list[np.ndarray] | None:
    """What `main`, which takes nothing, returns; None where XLA has to compute it.

    The module is changed where the interpreter asks for other operations.
    """
    operations = known_operations(module)
    if not operations:
        return None
    with module.context, ir.Location.unknown(module.context):
        for op in operations:
            if op.name in ("stablehlo.divide", "stablehlo.remainder"):
                never_by_zero(op)
        if any(op.name.startswith("chlo.") for op in operations):
            decomposition().run(module.operation)
        return [np.array(y) for y in stablehlo.eval_module(module, [])]


def known_operations(module: Any) -> list:
    """All operations of the module; none where one is not known."""
    found: list = []

    def look(op) -> ir.WalkResult:
        found.append(op)
        if is_known(op):
            return ir.WalkResult.ADVANCE
        found.clear()
        return ir.WalkResult.INTERRUPT

    module.operation.walk(look)
    return found


def is_known(op: Any) -> bool:
    if op.name not in KNOWN or not all(is_array(str(r.type)) for r in op.results):
        return False
    if op.name not in OF_WINDOWS:
        return True
    return not any(EMPTY.match(str(x.type)) for x in op.operands)


@functools.cache
def is_array(tensor: str) -> bool:
    return TENSOR.fullmatch(tensor) is not None


# once in a process
register_passes = functools.cache(stablehlo.register_stablehlo_passes)


def decomposition() -> PassManager:
    register_passes()
    return PassManager.parse("builtin.module(func.func(chlo-legalize-to-stablehlo))")


def never_by_zero(op: Any) -> None:
    """Whole numbers divided by 0, which would end the process, are divided by 1."""
    divisor = op.operands[1]
    kind = ir.RankedTensorType(divisor.type).element_type
    if not isinstance(kind, ir.IntegerType):
        return

    def full(value: int):
        number = ir.IntegerAttr.get(kind, value)
        return stablehlo.constant(ir.DenseElementsAttr.get_splat(divisor.type, number))

    with ir.InsertionPoint(op):
        equal = stablehlo.ComparisonDirectionAttr.get("EQ")
        is_zero = stablehlo.compare(divisor, full(0), equal)
        op.operands[1] = stablehlo.select(is_zero, full(1), divisor)
