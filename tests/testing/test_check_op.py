"""`check_op` on operators that are not of this library, right and wrong ones."""

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from jaxkern.primitives.kernel_primitive import REGISTRY, kernel_primitive
from jaxkern.testing import case, check_op, checks_of, f32
from jaxkern.testing.check_op import (
    EACH_CASE,
    EACH_FAMILY,
    EACH_SMALL_CASE,
    ON_MESHES,
)

CASES = [
    case("biased", x=f32(2, 4, 8), bias=f32(8)),
    case("plain", x=f32(4, 8)),
]


def declared(reference, **rules):
    p = kernel_primitive(reference, **rules)
    del REGISTRY[p.name]  # not one of the library
    return p


def sine_reference(
    x: Float[Array, "... d"], bias: Float[Array, " d"] | None
) -> Float[Array, "... d"]:
    y = jnp.sin(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return (y if bias is None else y + bias).astype(x.dtype)


def forgetful_reference(
    x: Float[Array, "... d"], bias: Float[Array, " d"] | None
) -> Float[Array, "... d"]:
    """It ignores the bias, and a row's mean is taken over its part on a device."""
    del bias
    return x - x.mean(-1, keepdims=True)


sine_p, forgetful_p = declared(sine_reference), declared(forgetful_reference)


def test_every_check_of_this_library_runs():
    names = [str(check) for check in checks_of(sine_p, CASES)]
    every = (*EACH_CASE, *EACH_SMALL_CASE, *ON_MESHES, *EACH_FAMILY)
    ran = {name.rpartition("-")[2] for name in names}
    assert {f.__name__.removeprefix("check_") for f in every} < ran
    assert len(names) == len(set(names)) == len(every) + len(CASES)


@pytest.mark.parametrize("check", checks_of(sine_p, CASES), ids=str)
def test_an_op_that_is_right(check):
    check()


def test_an_op_that_is_wrong_is_told_what_fails():
    with pytest.raises(ExceptionGroup, match="checks of forgetful fail") as raised:
        check_op(forgetful_p, CASES)
    notes = " ".join(note for e in raised.value.exceptions for note in e.__notes__)
    for name in ("optional_operands", "every_dim"):
        assert f"-{name}" in notes
    assert "-values" not in notes


def test_cases_that_check_nothing_are_refused():
    for cases in ([], [case("empty", x=f32(0, 8))], [case("large", x=f32(100, 100))]):
        with pytest.raises(ValueError, match="sine needs a case of at most 6000"):
            checks_of(sine_p, cases)
