"""What `explain` and `backend` refuse by name, and what they say of the GPU."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern import explain, rms_norm
from jaxkern.lowering.explain import Choice, Explanation

X = jnp.ones((4, 64))


def test_a_platform_that_nobody_has_is_refused():
    """It had no row for any op, so that every op ran its reference there."""
    message = r"^explain: `platform` must be one of .*cpu, cuda, .*got 'cdua'"
    with pytest.raises(ValueError, match=message):
        explain(rms_norm, X, platform="cdua")
    with pytest.raises(ValueError, match='An NVIDIA GPU is "cuda"'):
        explain(rms_norm, X, platform="gpu")


def test_a_gpu_that_is_assumed_is_said():
    """Other tests read the lines of the ops, none what they were compiled for."""
    pytest.importorskip("triton")
    from jaxkern.gpu.device import compiling_for, device_capability

    def text(platform):
        return str(explain(rms_norm, X, platform=platform))

    if device_capability() is None:
        assert "capability 8.0: there is no CUDA GPU here" in text("cuda")
    with compiling_for(90):
        assert text("cuda").endswith("compute capability 9.0: as asked")
        [row] = explain(rms_norm, X, platform="cuda").rows
    assert [launch.name for launch in row.launches] == ["row_norm_fwd_kernel"]
    assert "capability" not in text("cpu")


@pytest.mark.parametrize("name", ["pallas", "cutlass"])
def test_an_unknown_backend_lists_the_names_that_exist(name):
    """The test that it is refused did not read what to say instead."""
    with pytest.raises(ValueError, match="'mosaic_gpu'") as error:
        jaxkern.backend(name)
    hint = 'The Pallas kernels are "mosaic_gpu".'
    assert str(error.value).endswith(hint) == (name == "pallas")


def test_what_is_printed_of_a_choice():
    """Elsewhere words are searched in a text: a line more or less changes nothing."""

    class Launched:
        def describe(self):
            return "kernel: 4 programs"

    once = Choice("rms_norm", 1, "cpp: kernel", ("why",), "", (Launched(),))
    rest = {"refused": (), "measured": "measured so", "launches": ()}
    twice = dataclasses.replace(once, sites=2, **rest)
    assert str(Explanation("cpu", (once, twice), "of an H100")).splitlines() == [
        "rms_norm on cpu runs cpp: kernel",
        "  kernel: 4 programs",
        "  not why",
        "rms_norm on cpu runs cpp: kernel (2 call sites)",
        "  measured so",
        "of an H100",
    ]
