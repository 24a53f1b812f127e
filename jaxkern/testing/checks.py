"""What every op must pass, written once; `test_every_op.py` runs it over all CASES.

The truth is always the reference fed float64. A reference is checked against its
formula, by an independent evaluation, in the op's own test file. What holds on a mesh
is in `sharding_checks.py`, under transforms in `transform_checks.py`, at the edges in
`edge_checks.py`.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxkern.lowering import lower as lowering
from jaxkern.lowering.explain import explain
from jaxkern.primitives.call import Backend, backend_context
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.interpreter import evaluate_each

SMALL = 6000  # elements: larger cases get values and dtypes only


# Cases.


@dataclasses.dataclass(frozen=True)
class Spec:
    """An operand to draw: its shape, dtype and distribution."""

    shape: tuple[int, ...]
    dtype: Any
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

    def __call__(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(self.draw(rng, self.shape)).astype(self.dtype)


def normal(dtype) -> Callable[..., Spec]:
    def spec(*shape: int, scale: float = 1.0) -> Spec:
        """Normal numbers of mean 0, in the dtype of the name, times `scale`."""
        return Spec(shape, dtype, lambda rng, s: scale * rng.standard_normal(s))

    return spec


f64, f32, f16 = normal(np.float64), normal(np.float32), normal(np.float16)
bf16 = normal(jnp.bfloat16)


def i32(*shape: int, low: int = 0, high: int = 100) -> Spec:
    """Whole numbers of 32 bits from `low` on, below `high`, each as likely."""
    return Spec(shape, np.int32, lambda rng, s: rng.integers(low, high, s))


def u8(*shape: int) -> Spec:
    """Bytes, each as likely."""
    return Spec(shape, np.uint8, lambda rng, s: rng.integers(0, 256, s))


def boolean(*shape: int, probability: float = 0.5) -> Spec:
    """True with this probability."""
    return Spec(shape, np.bool_, lambda rng, s: rng.random(s) < probability)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Spec:
    """Numbers of float32 from `low` to `high`, each as likely."""
    return Spec(shape, np.float32, lambda rng, s: rng.uniform(low, high, s))


@dataclasses.dataclass(frozen=True, eq=False)  # a key of what is compiled for it
class Case:
    """Named operands and options of one call. `ulps` bounds the relative error.

    `straight_through`: results are steps of the operands, whose gradients are declared.
    """

    name: str
    arguments: dict[str, Any]
    full: bool
    ulps: float
    straight_through: bool = False


def case(
    name: str,
    *,
    full: bool = False,
    ulps: float = 8.0,
    straight_through: bool = False,
    **arguments: Any,
) -> Case:
    """A case: operands by name (a Spec, a callable of a Generator, or None), options.

    Options that are left out take the default of the op's public function. `full` keeps
    a case for `make test-full`. Of an op that rounds its operands `straight_through`
    the reference says the gradients, and finite differences would be others.

    Example:
      >>> from jaxkern.testing import case, f32
      >>> found = case("rows", x=f32(4, 8), eps=1e-5)
      >>> found.name, found.arguments["x"].shape, found.arguments["eps"]
      ('rows', (4, 8), 1e-05)
    """
    return Case(name, arguments, full, ulps, straight_through)


def operands_of(p: KernelPrimitive, case: Case, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    specs = [case.arguments.get(a.name) for a in p.operands]
    return [None if s is None else on_device(s(rng)) for s in specs]


def on_device(x: Any, sharding: NamedSharding | None = None) -> jax.Array:
    """x as JAX keeps it; unlike `jnp.asarray` it compiles nothing."""
    return jax.device_put(np.asarray(x), sharding)


def options_of(p: KernelPrimitive, case: Case) -> dict[str, Any]:
    names = [
        n
        for n, q in inspect.signature(p.reference).parameters.items()
        if q.kind is q.KEYWORD_ONLY
    ]
    public = getattr(inspect.getmodule(p.reference), p.name, p.reference)
    defaults = defaults_of(p.reference) | defaults_of(public)
    return {n: case.arguments[n] if n in case.arguments else defaults[n] for n in names}


def defaults_of(f: Callable) -> dict[str, Any]:
    """By name, also those of the fields of a record that is a default itself."""
    found = {n: q.default for n, q in inspect.signature(f).parameters.items()}
    records = [x for x in found.values() if dataclasses.is_dataclass(x)]
    for record in records:
        found |= {x.name: getattr(record, x.name) for x in dataclasses.fields(record)}
    return found


def num_elements(p: KernelPrimitive, case: Case) -> int:
    specs = [case.arguments.get(a.name) for a in p.operands]
    return sum(math.prod(s.shape) for s in specs if isinstance(s, Spec))


# Calling and comparing.


def bound(p: KernelPrimitive, case: Case, reference: bool = False) -> Callable:
    """The op, or its reference, as a function of its operands alone."""
    options = options_of(p, case)
    if not reference:
        return functools.partial(p, **options)
    return functools.partial(p.reference, **options)


@functools.lru_cache(maxsize=32)
def jitted(p: KernelPrimitive, case: Case, reference: bool = False) -> Callable:
    """The op, or its reference, compiled once for all checks of the case."""
    return jax.jit(bound(p, case, reference))


@functools.lru_cache(maxsize=32)
def jitted_with_gradients(
    p: KernelPrimitive, case: Case, reference: bool = False
) -> Callable:
    """The same with the gradients of every float operand: (values, gradients)."""
    return jax.jit(with_gradients(p, bound(p, case, reference)))


def with_gradients(p: KernelPrimitive, f: Callable, examples: int = 0) -> Callable:
    """A function that returns what `f` does and its gradients, () without any."""

    def every(*operands):
        if not differentiable(p, operands):
            return f(*operands), ()
        return f(*operands), gradients(f, operands, examples)(*operands)

    return every


def as_tuple(out: Any) -> tuple:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def in_float64(x: Any) -> Any:
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return on_device(np.asarray(x).astype(np.float64))


def truth(p: KernelPrimitive, case: Case, operands: Sequence) -> tuple:
    """The reference on the operands' values in float64, as NumPy arrays."""
    return truths(p, case, [operands])[0]


def truths(p: KernelPrimitive, case: Case, calls: Sequence[Sequence]) -> list[tuple]:
    """The truth for the operands of each call."""
    reference = jitted(p, case, reference=True)
    with jax.enable_x64(True):
        wide = [[in_float64(x) for x in operands] for operands in calls]
        if num_elements(p, case) <= SMALL:
            every = evaluate_each(reference, wide)
        else:
            every = [reference(*operands) for operands in wide]
        return [tuple(np.asarray(y) for y in as_tuple(out)) for out in every]


def is_float(x: Any) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def assert_near(actual: Any, expected: Any, ulps: float, dtype=None, what="") -> None:
    """Same shape, same NaN and infinities, relative error below `ulps` of the dtype."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if not jnp.issubdtype(expected.dtype, jnp.floating):  # NumPy's misses bfloat16
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    eps = float(jnp.finfo(dtype or actual.dtype).eps)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=what)
    assert np.isfinite(actual[finite]).all(), f"{what}: not finite"
    scale = np.linalg.norm(expected[finite])
    error = np.linalg.norm(actual[finite] - expected[finite])
    assert error <= ulps * eps * scale, f"{what}: error {error} at scale {scale}"


def same(actual: Any, expected: Any, ulps: float = 32.0, what: str = "") -> None:
    """Two float64 or float32 evaluations of one thing agree up to rounding."""
    for i, (a, e) in enumerate(zip(as_tuple(actual), as_tuple(expected), strict=True)):
        assert_near(a, e, ulps, what=f"{what} result {i}")


def float_operands(operands: Sequence) -> list[int]:
    return [i for i, x in enumerate(operands) if is_float(x)]


MOST_WEIGHTS = 8191  # of different ones; a prime, which no dim repeats


def loss_of(
    f: Callable, operands: Sequence, wrt: Sequence[int], examples: int = 0
) -> Callable:
    """A scalar that weighs every float result differently, as a function of `wrt`.

    The first `examples` axes of the results count examples, whose losses are added.
    """

    def loss(*values):
        full = list(operands)
        for i, v in zip(wrt, values, strict=True):
            full[i] = v
        total = jnp.zeros((), values[0].dtype if values else None)
        for y in as_tuple(f(*full)):
            if is_float(y) and y.size:
                own = y.shape[examples:]
                # no equations of their own; cosines of millions would take long
                count = min(math.prod(own), MOST_WEIGHTS)
                weights = np.resize(np.cos(np.arange(count, dtype=np.float32)), own)
                y = jnp.where(jnp.isfinite(y), y, 0)
                total = total + jnp.sum(weights * jnp.sin(y.astype(total.dtype)))
        return total

    return loss


def gradients(f: Callable, operands: Sequence, examples: int = 0) -> Callable:
    """Gradients of `loss_of` for every float operand, as a function of all operands."""
    wrt = float_operands(operands)

    def grad(*operands):
        values = [operands[i] for i in wrt]
        loss = loss_of(f, operands, wrt, examples)
        return jax.grad(loss, tuple(range(len(wrt))))(*values)

    return grad


def differentiable(p: KernelPrimitive, operands: Sequence) -> bool:
    return bool(float_operands(operands)) and any(r.is_float for r in p.results)


# The checks. Each takes an op and a case.


def check_values(p: KernelPrimitive, case: Case) -> None:
    """Values against float64; the declared dims of every result."""
    operands = operands_of(p, case)
    results = as_tuple(jitted(p, case)(*operands))
    for y, e in zip(results, truth(p, case, operands), strict=True):
        assert_near(y, e, case.ulps, what=p.name)
    check_result_dims(p, operands, results)


def check_eager(p: KernelPrimitive, case: Case) -> None:
    """The same without `jit`."""
    operands = operands_of(p, case)
    results = as_tuple(bound(p, case)(*operands))
    for y, e in zip(results, truth(p, case, operands), strict=True):
        assert_near(y, e, case.ulps, what=f"{p.name} eager")


def check_result_dims(p: KernelPrimitive, operands: Sequence, results: tuple) -> None:
    sizes: dict[str, int] = {}
    lead: tuple[int, ...] = ()
    for a, x in zip(p.operands, operands, strict=True):
        if x is not None:
            named = zip(a.labels[::-1], x.shape[::-1], strict=False)
            sizes |= {k: n for k, n in named if k.isidentifier()}
            lead = x.shape[: x.ndim - len(a.labels)] if a.has_leading else lead
    for r, y in zip(p.results, results, strict=True):
        shape = y.shape
        if r.has_leading:
            assert shape[: len(lead)] == lead, (r, shape)
            shape = shape[len(lead) :]
        assert len(shape) == len(r.labels), (r, y.shape)
        for label, n in zip(r.labels, shape, strict=True):
            assert label not in sizes or sizes[label] == n, (r, y.shape)
            assert not label.isdigit() or int(label) == n, (r, y.shape)


def check_dtypes(p: KernelPrimitive, case: Case) -> None:
    """In every float dtype: the reference's result dtypes, near the float64 truth."""
    given = operands_of(p, case)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    every = [[x.astype(dtype) if is_float(x) else x for x in given] for dtype in dtypes]
    grad = num_elements(p, case) <= SMALL
    if grad:
        found = evaluate_each(with_gradients(p, bound(p, case)), every)
    else:
        run = jitted(p, case)
        found = [run(*operands) for operands in every]
    reference = bound(p, case, reference=True)
    true = truths(p, case, every)
    for dtype, operands, out, expected in zip(dtypes, every, found, true, strict=True):
        values, grads = out if grad else (out, ())
        shapes = as_tuple(jax.eval_shape(reference, *operands))
        for y, s, e in zip(as_tuple(values), shapes, expected, strict=True):
            assert y.dtype == s.dtype
            if is_float(y):  # near ties, an integer result may differ in low precision
                assert_near(y, e, case.ulps, what=f"{p.name} {jnp.dtype(dtype)}")
        wrt = float_operands(operands) if grads else ()
        for i, g in zip(wrt, grads, strict=True):
            assert g.dtype == operands[i].dtype, p.operands[i].name
            assert g.shape == operands[i].shape, p.operands[i].name


@contextlib.contextmanager
def own_rows(p: KernelPrimitive):
    """Inside, the op has no rows but those that are added; after it, its own again."""
    family = [q for q in (p, p.fwd, p.bwd) if q is not None]
    for platform in ("cpu", "cuda", "mps"):
        for q in family:
            lowering.rows_on(q, platform)  # not while they are put aside
    before = [dict(q.rows) for q in family]
    for q in family:
        q.rows.clear()
    try:
        yield family
    finally:
        for q, rows in zip(family, before, strict=True):
            q.rows.clear()
            q.rows.update(rows)


@contextlib.contextmanager
def opaque_kernels(p: KernelPrimitive):
    """Runs the op's references as if they were kernels that XLA cannot look into.

    The backend has a name of its own, so no compiled call is shared with the others.
    """
    with own_rows(p) as family, backend_context(Backend("opaque", strict=True)):
        for q in family:
            row = lowering.Row("opaque", q.reference, lowering.never_refuses)
            lowering.add_row(q, "cpu", row)
        yield


def label_of(p: KernelPrimitive, operands: Sequence, i: int, dim: int) -> str:
    """The label of a dim; leading dims are `l0`, `l1` ..."""
    labels = p.operands[i].labels
    at = dim - (operands[i].ndim - len(labels))
    return labels[at] if at >= 0 else f"l{dim}"


def check_kernel_is_used(p: KernelPrimitive, case: Case) -> None:
    """With a row, every equation of the op and its gradient runs the kernel."""
    operands = operands_of(p, case)
    f = bound(p, case)
    with opaque_kernels(p):
        functions = [f] + (
            [gradients(f, operands)] if differentiable(p, operands) else []
        )
        for g in functions:
            for row in explain(g, *operands).rows:
                expected = "opaque" if p.bwd is not None or row.op == p.name else ""
                assert row.runs.startswith(expected), row
