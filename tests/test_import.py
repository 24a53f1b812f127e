"""`import jaxkern` brings what declares operators, and nothing that one call needs.

A module imported at the top of the wrong file costs every user a second, and no test
that calls an operator can see it.
"""

import subprocess
import sys

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
print(*{f.__qualname__ for f in walked if not isinstance(f, type)})
"""


def test_annotations_are_read_once_and_those_of_checks_at_the_first_call():
    run = subprocess.run(
        [sys.executable, "-c", WALKED], capture_output=True, text=True, check=True
    )
    assert not run.stdout.split(), f"{run.stdout}: use `type_hints` of records.py"
