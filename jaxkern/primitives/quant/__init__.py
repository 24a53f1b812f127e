"""Quantised weights and products with them."""

from jaxkern.primitives.quant.affine_matmul import dequantize_affine
from jaxkern.primitives.quant.affine_tensor import AffineTensor
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.fake_quant import fake_quant
from jaxkern.primitives.quant.fp4 import pack_fp4, unpack_fp4
from jaxkern.primitives.quant.fp8 import quantize_fp8
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.fused_products import (
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.import_int4 import (
    int4_from_awq,
    int4_from_gptq,
    int4_from_linear,
    int4_to_linear,
)
from jaxkern.primitives.quant.int8_matmul import int8_matmul
from jaxkern.primitives.quant.int_tensor import IntTensor, quantize_int
from jaxkern.primitives.quant.interleaved_tensor import InterleavedTensor, interleave
from jaxkern.primitives.quant.microscaled import quantize_microscaled
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.nf4 import nf4_from_bitsandbytes, quantize_nf4
from jaxkern.primitives.quant.nf4_tensor import NF4Tensor
from jaxkern.primitives.quant.quantize_affine import quantize_affine
from jaxkern.primitives.quant.quantize_gguf import quantize_gguf
from jaxkern.primitives.quant.quantized_embedding import quantized_embedding
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.quant.quantized_matmul_id import quantized_matmul_id
from jaxkern.primitives.quant.requantize import requantize

__all__ = [
    "AffineTensor",
    "FP8Tensor",
    "GGUFTensor",
    "IntTensor",
    "InterleavedTensor",
    "MicroscaledTensor",
    "NF4Tensor",
    "dequantize",
    "dequantize_affine",
    "fake_quant",
    "int4_from_awq",
    "int4_from_gptq",
    "int4_from_linear",
    "int4_to_linear",
    "int8_matmul",
    "interleave",
    "nf4_from_bitsandbytes",
    "pack_fp4",
    "quantize_affine",
    "quantize_fp8",
    "quantize_gguf",
    "quantize_int",
    "quantize_microscaled",
    "quantize_nf4",
    "quantized_embedding",
    "quantized_matmul",
    "quantized_matmul_add",
    "quantized_matmul_id",
    "quantized_rms_norm_matmul",
    "quantized_swiglu",
    "requantize",
    "unpack_fp4",
]
