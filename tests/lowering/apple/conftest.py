import pytest

from jaxkern.lowering.apple import fused, fused_affine
from tests.lowering.apple.fused_calls import play


@pytest.fixture
def played(monkeypatch):
    """Rows of jax-mps that call the kernels in plain JAX."""
    for module in (fused, fused_affine):
        monkeypatch.setattr(module, "call", play)
