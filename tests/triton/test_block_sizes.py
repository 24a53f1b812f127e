"""The rules of kernels for their sizes: what was measured, and what fits."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern.gpu.device import compiling_for, num_sms
from jaxkern.gpu.triton_call import max_shared_bytes
from jaxkern.triton.activation import streamed_softmax
from jaxkern.triton.norm import streamed_rows
from jaxkern.triton.norm.row_norm_forward import forward_tile


@pytest.mark.parametrize(
    "d, dtype, rows, warps",
    [(100, "bfloat16", 32, 8), (256, "bfloat16", 8, 2), (128, "float32", 16, 4)],
)
def test_narrow_rows_have_the_sizes_that_were_faster(d, dtype, rows, warps):
    with compiling_for(90):
        sizes = forward_tile(131072, d, jnp.dtype(dtype))
    assert (sizes["ROWS"], sizes["num_warps"]) == (rows, warps)


def test_what_was_measured_on_one_gpu_is_for_that_one():
    with compiling_for(80):
        sizes = forward_tile(131072, 100, jnp.dtype("bfloat16"))
    assert (sizes["ROWS"], sizes["num_warps"]) == (16, 4)


@pytest.mark.parametrize("rows", [0, 1, 131, 133, 264, 4096, 5461])
def test_as_few_programs_stream_as_are_needed(rows, monkeypatch):
    monkeypatch.setattr(streamed_rows, "num_sms", lambda: 132)
    programs = streamed_rows.even_programs(rows)
    most = -(-rows // 132)
    assert programs <= min(rows, 132)
    assert rows == 0 or -(-rows // programs) == most
    assert programs < 2 or -(-rows // (programs - 1)) > most


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_stream_fit_in_shared_memory(capability, dtype):
    """What a multiprocessor runs beside each other; none where a row does not fit."""
    taken = set()
    with compiling_for(capability):
        for d in range(2056, 66000, 1032):
            x = jax.ShapeDtypeStruct((4096, d), jnp.bfloat16)
            weight = jax.ShapeDtypeStruct((d,), dtype)
            if sizes := streamed_rows.stream_sizes(x, weight):
                columns = sizes["BLOCK"] * -(-d // sizes["BLOCK"])
                used = 4 * columns * sizes["QUEUED"] + 1024
                used += columns * weight.dtype.itemsize * sizes["SHARED_WEIGHT"]
                waves = -(-sizes["PROGRAMS"] // num_sms())
                assert used * waves <= max_shared_bytes()
                taken.add(d)
            if sizes := streamed_softmax.stream_sizes(x):
                columns = sizes["BLOCK"] * -(-d // sizes["BLOCK"])
                waves = sizes["PROGRAMS"] // num_sms()
                assert (2 * columns + 1024) * waves <= max_shared_bytes()
                taken.add(-d)
    assert min(taken) < -32768 < 8192 < max(taken)
