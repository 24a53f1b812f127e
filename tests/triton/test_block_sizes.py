"""A device's measured table overrides the rules of the kernels, elsewhere they hold."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxkern.triton import block_sizes
from jaxkern.triton.norm.row_norm import forward_tile


@pytest.mark.parametrize("device, rows", [("NVIDIA H200", 32), ("NVIDIA A100", 16)])
def test_a_table_overrides_the_rule_on_its_device_only(device, rows, monkeypatch):
    found = SimpleNamespace(device_kind=device, core_count=132)
    monkeypatch.setattr(block_sizes, "cuda_device", lambda: found)
    sizes = forward_tile(131072, 128, jnp.bfloat16)
    assert (sizes["ROWS"], sizes["BLOCK"]) == (rows, 128)
    assert forward_tile(131072, 128, jnp.float32)["ROWS"] == 16
