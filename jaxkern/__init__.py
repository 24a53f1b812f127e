"""jaxkern: the operators of today's models as JAX primitives with every rule."""

from jaxkern.lowering import cpu as _cpu
from jaxkern.lowering import cuda as _cuda
from jaxkern.lowering.lower import backend, explain
from jaxkern.primitives.linear.linear import linear
from jaxkern.primitives.norm.rms_norm import rms_norm
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.quantized_embedding import quantized_embedding
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul

__all__ = [
    "GGUFTensor",
    "backend",
    "dequantize",
    "explain",
    "linear",
    "quantized_embedding",
    "quantized_matmul",
    "rms_norm",
]

del _cpu, _cuda  # imported for their rows
