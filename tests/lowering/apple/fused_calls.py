"""Fused calls without jax-mps: played by the kernels in plain JAX, or read as sent."""

import json

import jax
import jax.numpy as jnp

import jaxkern as jk
from jaxkern.lowering.apple.findings import title
from jaxkern.lowering.apple.wire import Module, export, text
from tests.lowering.apple import mlx_kernels


def play(target, result, *operands, **options):
    """`fused.call` by the kernels in plain JAX, as picky as jax-mps should be."""
    json.dumps(options, allow_nan=False)
    floats = {x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)}
    assert len(floats) == 1, f"{target} would promote {floats}"
    if target == "quantize":  # proved to be MLX's own bits in test_quantize_affine
        assert operands[0].ndim >= 2
        t = jk.quantize_affine(*operands, **options)
        y = (t.codes, t.scales, t.biases)
    else:
        y = mlx_kernels.KERNELS[f"mps.{target}"](*operands, **options)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), (y, result))
    assert shapes[0] == shapes[1], target
    return y


def sent(f):
    """(target, config, types) of each fused call in the wire form of f()."""
    module = Module(export(f, platform="mps").mlir_module_serialized)
    for _, op in module.operations(lambda name: False):
        if op.name == "stablehlo.custom_call":
            types = [str(v.type) for v in [*op.operands, *op.results]]
            yield title(op), text(op, "backend_config"), types
