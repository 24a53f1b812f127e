"""A reference of records declares what the same one of single operands does.

Every attention is declared so; what only a record can get wrong, its order, an absent
field, an option that is lost, would be wrong in op and reference alike.
"""

import inspect
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.records import flat


class Rows(NamedTuple):
    x: Float[Array, "... d"]
    weight: Float[Array, " d"] | None = None
    count: Int[Array, "..."] | None = None


class Gradients(NamedTuple):
    x: Float[Array, "... d"]
    weight: Float[Array, " d"] | None
    shift: Float[Array, " d"]


class Scale(TypedDict):
    scale: float


class Options(Scale):
    power: int


def grouped_reference(
    o: Rows, shift: Float[Array, " d"], **options: Unpack[Options]
) -> Float[Array, "... d"]:
    y = options["scale"] * o.x ** options["power"]
    y = y if o.weight is None else y * o.weight
    return y + shift if o.count is None else (y + shift) * o.count[..., None]


def grouped_bwd_reference(
    o: Rows,
    shift: Float[Array, " d"],
    dy: Float[Array, "... d"],
    *,
    power: int,
    **options: Unpack[Scale],
) -> Gradients:
    dy = dy if o.count is None else dy * o.count[..., None]
    grown = options["scale"] * dy * (1 if o.weight is None else o.weight)
    rows = tuple(range(o.x.ndim - 1))
    dweight = (options["scale"] * dy * o.x**power).sum(rows)
    return Gradients(
        grown * power * o.x ** (power - 1),
        None if o.weight is None else dweight,
        dy.sum(rows) + 0 * shift,
    )


def single_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    count: Int[Array, "..."] | None,
    shift: Float[Array, " d"],
    *,
    scale: float,
    power: int,
) -> Float[Array, "... d"]:
    return grouped_reference(Rows(x, weight, count), shift, scale=scale, power=power)


grouped_p = kernel_primitive(grouped_reference, bwd=grouped_bwd_reference)
single_p = kernel_primitive(single_reference)
X = jnp.linspace(0.5, 2.0, 12).reshape(3, 4)
OPTIONS = dict(scale=0.5, power=3)


def test_the_declaration_is_that_of_single_operands():
    assert grouped_p.operands == single_p.operands
    assert grouped_p.results == single_p.results
    assert str(grouped_p).removeprefix("grouped") == str(single_p)[len("single") :]
    names = ["x", "weight", "count", "shift", "scale", "power"]
    assert list(inspect.signature(grouped_p.reference).parameters) == names
    assert [a.name for a in grouped_p.bwd.operands] == [*names[:4], "dy"]
    assert [a.optional for a in grouped_p.bwd.results] == [False, True, False]
    assert flat(single_reference) is single_reference


@pytest.mark.parametrize("weight", [None, jnp.arange(4.0)], ids=["absent", "given"])
def test_values_and_gradients_are_those_of_single_operands(weight):
    count, shift = jnp.array([2, 0, 1]), jnp.arange(4.0) - 1

    def of(p):
        def f(x, shift, *weights):
            w = weights[0] if weights else None
            return jnp.sin(p(x, w, count, shift, **OPTIONS)).sum()

        floats = (X, shift) if weight is None else (X, shift, weight)
        return jax.value_and_grad(f, tuple(range(len(floats))))(*floats)

    for y, e in zip(*map(jax.tree.leaves, (of(grouped_p), of(single_p))), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-6)
    with pytest.raises(TypeError, match="grouped: dim `d` is 4 in `x` but 3 in"):
        grouped_p(X, weight, count, shift[1:], **OPTIONS)
