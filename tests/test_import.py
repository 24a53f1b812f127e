"""`import jaxkern` brings what declares operators, and nothing that one call needs.

A module imported at the top of the wrong file costs every user a second, and no test
that calls an operator can see it.
"""

import subprocess
import sys

import pytest
from jaxtyping import Array, Float

import jaxkern

LATER = (
    "triton",
    "torch",
    "scipy",
    "gguf",
    "safetensors",
    "tokenizers",
    "jinja2",
    "rich",
    "optax",
    "orbax",
    "flatbuffers",
    "jax.experimental.pallas",
    "jax.experimental.pallas.mosaic_gpu",
    "jaxkern.models",
    "jaxkern.train",
    "jaxkern.runtime",
    "jaxkern.formats",
    "jaxkern.triton",
    "jaxkern.pallas",
    "jaxkern.cpu",
    "jaxkern.gpu",
)
SEEN = """
import sys, jax, jax.extend.core, jaxtyping
before = set(sys.modules)
import jaxkern
print(*sorted(set(sys.modules) - before))
"""


def imported() -> set[str]:
    """Modules that jaxkern adds to those of jax and jaxtyping."""
    run = subprocess.run(
        [sys.executable, "-c", SEEN], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_kernels_models_and_what_they_need_come_later():
    found = imported()
    own = {name for name in found if name.split(".")[0] == "jaxkern"}
    assert "jaxkern.primitives.norm.rms_norm" in own
    early = [m for m in LATER if any((n + ".").startswith(m + ".") for n in found)]
    assert not early, f"import {early} where it is first needed"
    others = found - own
    assert len(others) < 40, sorted(others)


WALKED = """
import typing
walk, walked = typing.get_type_hints, []
typing.get_type_hints = lambda f, *a, **k: walked.append(f) or walk(f, *a, **k)
import jaxkern
ours = {f for f in walked if getattr(f, '__module__', '').startswith('jaxkern')}
print(*{f.__qualname__ for f in ours if not isinstance(f, type)})
"""


def test_annotations_are_read_once_and_those_of_checks_at_the_first_call():
    run = subprocess.run(
        [sys.executable, "-c", WALKED], capture_output=True, text=True, check=True
    )
    assert not run.stdout.split(), f"{run.stdout}: use `type_hints` of records.py"


COLLECTED = """
import gc, sys
if sys.argv[1] == "off":
    gc.disable()
seen = []
gc.callbacks.append(lambda phase, info: seen.append("jaxkern.lowering" in sys.modules))
import jaxkern
print(gc.isenabled(), any(seen))
"""


@pytest.mark.parametrize("collection, left", [("on", "True"), ("off", "False")])
def test_garbage_is_not_collected_while_importing(collection, left):
    """Each collection would walk all of jax; afterwards it is as it was."""
    run = subprocess.run(
        [sys.executable, "-c", COLLECTED, collection],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [left, "False"]


def test_equal_annotations_are_one_class_while_importing_and_not_afterwards():
    x, y = (f.__annotations__["x"] for f in (jaxkern.rms_norm, jaxkern.layer_norm))
    assert x is y, "each class of jaxtyping costs time, 2400 of them a tenth of it"
    assert Float[Array, "... d"] is not Float[Array, "... d"], "as jaxtyping has it"
