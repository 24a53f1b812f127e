"""Every public name's docstring ends with an example, and the example is true.

Docstrings were only read for the names of arguments before: a call that could not run,
or that printed something else, would have stood in them unseen.

Arrays are printed as `jnp.set_printoptions(precision=3, suppress=True)` has them.
"""

import doctest
import importlib
import inspect
import operator
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern import runtime, testing
from jaxkern.interop import flax, jax_nn, tokamax
from jaxkern.primitives.kernel_primitive import REGISTRY

PARSER = doctest.DocTestParser()
SECTION = re.compile(r"\n\nExample:\n((?:  .*\n?)+)\Z")


def example_of(docstring: str, name: str) -> doctest.DocTest:
    """The section at the end of a docstring, ready to run."""
    section = SECTION.search(docstring)
    assert section, f'{name}: end its docstring with "Example:" and lines of ">>>".'
    names = {"jax": jax, "jnp": jnp, "np": np, "jaxkern": jaxkern}
    names["__name__"] = "__main__"  # where functions of an example are
    return PARSER.get_doctest(section[1], names, name, None, None)


def failures(test: doctest.DocTest) -> str:
    """What an example printed and should not have; empty if all of it is true."""
    said: list[str] = []
    with np.printoptions(precision=3, suppress=True):
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


class Held:
    """As a variable of Keras: an array by `__jax_array__` alone."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def of_holders(f):
    """`f`, but each array among its arguments comes in a `Held`."""

    def held(x):
        return Held(x) if isinstance(x, jax.Array) else x

    if f in (jaxkern.backend, jaxkern.explain, jaxkern.tuned):  # they take no operands
        return f
    return lambda *args, **options: f(
        *map(held, args), **{name: held(x) for name, x in options.items()}
    )


# records of arrays stand in the examples of the functions that return them
RECORDS = {"Metrics", "TrainState", "TrainStep"}
OF_TRAINING = [f"train.{name}" for name in {*jaxkern.train.__all__} - RECORDS]


@pytest.mark.parametrize("name", [*jaxkern.__all__, *sorted(OF_TRAINING)])
def test_a_public_name_has_an_example_that_is_true(name, monkeypatch):
    docstring = inspect.getdoc(operator.attrgetter(name)(jaxkern)) or ""
    test = example_of(docstring, name)
    assert 1 <= len(test.examples) <= 8
    assert len(test.examples) == docstring.count(">>>"), "one outside of its section"
    assert not any(e.options for e in test.examples), "an example is run, not skipped"
    assert any(e.want for e in test.examples), "it shows nothing"
    sources = "".join(e.source for e in test.examples)
    assert f"jaxkern.{name}" in sources, "it shows another function"
    assert not failures(test)
    if name in jaxkern.__all__ and inspect.isfunction(f := getattr(jaxkern, name)):
        monkeypatch.setattr(jaxkern, name, of_holders(f))
        assert not failures(example_of(docstring, name)), "of what holds an array"


def functions_of(*modules: types.ModuleType) -> list[tuple[str, str]]:
    """(module, name) of each public function; what has examples elsewhere left out."""
    return [
        (module.__name__, name)
        for module in modules
        for name in module.__all__
        if inspect.isroutine(inspect.unwrap(getattr(module, name)))
        and name not in DRAWS
    ]


DRAWS = {"bf16", "boolean", "f16", "f32", "f64", "i32", "u8", "uniform"}  # see `case`
OTHERS = [
    ("jaxkern.lowering.lower", "lower"),
    ("jaxkern.primitives.kernel_primitive", "kernel_primitive"),
    ("jaxkern.runtime", "BufferPool"),
    ("jaxkern.runtime", "MemoryTracker"),
    ("jaxkern.interop.tokamax", "RaggedDotGroupSizes"),
]


@pytest.fixture
def registry_as_it_was():
    known = set(REGISTRY)
    yield
    for name in {*REGISTRY} - known:
        del REGISTRY[name]


@pytest.mark.usefixtures("compilation_cache_as_it_was", "registry_as_it_was")
@pytest.mark.parametrize(
    "module, name",
    [
        *functions_of(flax, jax_nn, tokamax, testing, runtime, runtime.testing),
        *OTHERS,
    ],
)
def test_functions_of_other_modules_have_examples_that_are_true(module, name):
    found = getattr(importlib.import_module(module), name)
    test = example_of(inspect.getdoc(found) or "", name)
    assert 1 <= len(test.examples) <= 8 and any(e.want for e in test.examples)
    assert any(f"{name}(" in e.source for e in test.examples), name
    assert not failures(test)


def test_an_example_that_is_not_true_is_found():
    right = "Sums.\n\nExample:\n  >>> jnp.ones(2).sum()\n  Array(2., dtype=float32)\n"
    assert not failures(example_of(right, "right"))
    wrong = right.replace("2., d", "3., d")
    assert "Got:" in failures(example_of(wrong, "wrong"))
    raising = right.replace("jnp.ones(2)", "jnp.one(2)")
    assert "AttributeError" in failures(example_of(raising, "raising"))
    for none in ("Sums.", right + "\nRaises:\n  Nothing.\n"):
        with pytest.raises(AssertionError, match="end its docstring"):
            example_of(none, "none")
