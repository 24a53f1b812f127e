"""Products with packed and with plain weights: what is launched, what is refused.

The numbers are compared on a GPU, in tests/gpu/test_products.py.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import (
    explain,
    linear,
    quantized_matmul,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import Launch
from jaxkern.triton.quant.packed_products import BYTES
from tests.triton.test_every_kernel import packed, spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def last_row(f, *operands):
    *_, row = explain(f, *operands, platform="cuda").rows
    return row


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("qtype", ["Q4_K", "Q8_0"])
def test_a_block_takes_one_launch_and_spills_nothing(qtype, capability):
    """One activation of a wide model: the norm, both halves and the gate."""

    def gated(x, norm, w):
        return quantized_swiglu(x, w, norm)

    with compiling_for(capability):
        operands = spec(1, 4096), spec(4096, dtype="float32"), packed(qtype, 64, 4096)
        [launch] = last_row(gated, *operands).launches
        assert isinstance(launch, Launch)
        assert launch.stack_bytes == 0 and launch.registers <= 168  # three programs fit
        if capability >= 90:  # bulk copies, products of whole numbers
            assert "UBLKCP" in launch.sass and "IMMA.16832" in launch.sass
        else:  # whole words, which leave the cache first
            assert "LDG.E.EF.64" in launch.sass and "HMMA" in launch.sass


@pytest.mark.parametrize("qtype", BYTES)
def test_many_activations_get_decoded_weights(qtype):
    w = packed(qtype, 32, 512)
    names = {}
    for capability, rows in ((80, 8), (80, 64), (80, 65), (90, 9), (90, 17), (90, 385)):
        with compiling_for(capability):
            [launch] = last_row(quantized_matmul, spec(rows, 512), w).launches
        names[capability, rows] = launch.name
    assert names == {
        (80, 8): "packed_product_kernel",
        (80, 64): "several_activations_kernel",
        (80, 65): "decode_tiles_kernel",
        (90, 9): "several_activations_kernel",
        (90, 17): "many_activations_kernel",
        (90, 385): "decode_tiles_kernel",
    }


def test_norms_of_many_rows_are_kernels_of_their_own():
    def normal(x, norm, w):
        return quantized_rms_norm_matmul(x, norm, w)

    norm, w = spec(512, dtype="float32"), packed("Q4_K", 32, 512)
    names = [x.name for x in last_row(normal, spec(9, 512), norm, w).launches]
    assert len(names) == 2 and names[1] == "several_activations_kernel"
    names = [x.name for x in last_row(normal, spec(8, 512), norm, w).launches]
    assert names == ["packed_product_kernel"]


@pytest.mark.parametrize(
    "reason, f, operands",
    [
        (
            "NVFP4 has no kernel",
            quantized_matmul,
            (spec(1, 256), packed("NVFP4", 16, 256)),
        ),
        (
            "compute_dtype is int8",
            lambda x, w: quantized_matmul(x, w, compute_dtype=jnp.int8),
            (spec(1, 256), packed("Q4_K", 16, 256)),
        ),
        (
            "65 activations of 4 terms",
            quantized_matmul,
            (spec(65, 256, dtype="float32"), packed("Q4_K", 16, 256)),
        ),
        (
            "there are no elements",
            quantized_matmul,
            (spec(0, 256), packed("Q4_K", 16, 256)),
        ),
        ("rows of 580 columns", linear, (spec(1, 580), spec(64, 580))),
        ("rows of 248 columns", linear, (spec(1, 248), spec(64, 248))),
        ("`w` is float16", linear, (spec(1, 512), spec(64, 512, dtype="float16"))),
    ],
)
def test_refusals(reason, f, operands):
    row = last_row(f, *operands)
    assert row.runs.startswith("xla") and any(reason in r for r in row.refused)


def test_many_activations_by_plain_weights_are_left_to_xla():
    from jaxkern import backend

    with backend("auto"):
        row = last_row(linear, spec(5, 512), spec(64, 512))
        assert row.runs.startswith("xla") and "5 activations, over 4" in row.refused[0]
        row = last_row(linear, spec(4, 512), spec(64, 512))
        assert row.runs.startswith("triton")
    operands = jax.ShapeDtypeStruct((4, 512), jnp.bfloat16), spec(64, 512)
    assert last_row(linear, *operands).launches[0].name == "few_products_kernel"
