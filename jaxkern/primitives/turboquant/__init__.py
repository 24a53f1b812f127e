"""Quantised vectors, for caches."""

from jaxkern.primitives.turboquant.fwht import fwht
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook, lloyd_max_error
from jaxkern.primitives.turboquant.quantize_vectors import (
    dequantize_vectors,
    quantize_straight_through,
    quantize_vectors,
    turboquant_decode,
    turboquant_encode,
)
from jaxkern.primitives.turboquant.quantized_vectors import QuantizedVectors
from jaxkern.primitives.turboquant.rotate import rotate, rotation_signs, unrotate
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    IntCodec,
    TurboQuantCodec,
)

__all__ = [
    "Float8Codec",
    "IntCodec",
    "QuantizedVectors",
    "TurboQuantCodec",
    "dequantize_vectors",
    "fwht",
    "lloyd_max_codebook",
    "lloyd_max_error",
    "quantize_straight_through",
    "quantize_vectors",
    "rotate",
    "rotation_signs",
    "turboquant_decode",
    "turboquant_encode",
    "unrotate",
]
