"""Calls of products with packed weights and of experts slot by slot, for `samples`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern as jk
from jaxkern.lowering.apple.declared_sample import Call, Draw
from jaxkern.primitives.linear.encode_fp8 import encode_fp8_p
from jaxkern.primitives.linear.encode_rows_fp8 import (
    encode_rows_fp8_p,
    swiglu_rows_fp8_p,
)
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.primitives.moe.norm_route import norm_route_p

part = functools.partial


def quantised(x: Draw) -> dict[str, Call]:
    rows, w, stack = x(3, 64), x(8, 64), x(2, 8, 64)
    ids, chosen = jnp.array([1, 7, 9]), jnp.array([1, 0, 1])
    formats = {
        "affine": part(jk.quantize_affine, group_size=32),
        "gguf": part(jk.quantize_gguf, qtype="Q4_0"),
        "fp8": part(jk.quantize_fp8, block=(4, 32)),
        "int": part(jk.quantize_int, bits=4, group_size=32),
        "microscaled": jk.quantize_microscaled,
        "nf4": part(jk.quantize_nf4, group_size=32),
    }
    name = {  # of the primitives
        "dequantize": lambda f: "dequantize" if f == "gguf" else f"dequantize_{f}",
        "matmul": lambda f: "quantized_matmul" if f == "gguf" else f"{f}_matmul",
        "embedding": lambda f: (
            "quantized_embedding" if f == "gguf" else f"{f}_embedding"
        ),
        "id": lambda f: "quantized_matmul_id" if f == "gguf" else f"{f}_matmul_id",
    }
    found: dict[str, Call] = {
        "quantize_affine": (formats["affine"], (w,)),
        "quantize_gguf": (formats["gguf"], (w,)),
        "quantize_fp8": (formats["fp8"], (w,)),
        "quantize_microscaled": (formats["microscaled"], (w,)),
        "int8_matmul": (lambda a: jk.int8_matmul(a, jk.quantize_int(w)), (rows,)),
        "linear": (lambda a, b: jk.linear(a, b.astype(jnp.bfloat16)), (rows, w)),
        "encode_fp8": (part(encode_fp8_p, form="e5m2"), (x(2, 3, 8), jnp.float32(0.5))),
        "encode_rows_fp8": (encode_rows_fp8_p, (x(2, 3, 8),)),
        "swiglu_rows_fp8": (
            part(swiglu_rows_fp8_p, alpha=1.0, limit=None, up_offset=0.0),
            (x(3, 8), x(3, 8)),
        ),
        "linear_fp8": (part(jk.linear, compute_dtype=jnp.float8_e4m3fn), (rows, w)),
        "matmul_transpose_b": (jk.matmul_transpose_b, (x(4, 3, 16), x(2, 5, 16))),
    }
    tiles = jk.interleave(formats["gguf"](x(16, 64)))
    pair = jk.interleave(formats["gguf"](x(32, 64)))  # of 16 rows each
    experts = jk.interleave(formats["gguf"](x(2, 16, 64)))
    found |= {
        "dequantize_interleaved": (part(jk.dequantize, tiles), ()),
        "interleaved_matmul": (part(jk.quantized_matmul, w=tiles), (rows,)),
        "interleaved_embedding": (part(jk.quantized_embedding, ids, tiles), ()),
        "interleaved_rms_norm_matmul": (
            lambda a, norm: jk.quantized_rms_norm_matmul(a, norm, tiles),
            (rows, x(64)),
        ),
        "interleaved_swiglu": (part(jk.quantized_swiglu, w=pair), (rows,)),
        "interleaved_matmul_add": (
            lambda a, residual: jk.quantized_matmul_add(a, tiles, residual),
            (rows, x(*rows.shape[:-1], tiles.shape[-2])),
        ),
        "dense_rms_norm_matmul": (jk.quantized_rms_norm_matmul, (rows, x(64), w)),
        "dense_swiglu": (jk.quantized_swiglu, (rows, w, x(64))),
        "dense_matmul_add": (jk.quantized_matmul_add, (rows, w, x(3, 8))),
        "interleaved_matmul_id": (
            part(jk.quantized_matmul_id, w=experts, ids=chosen),
            (rows,),
        ),
    }
    for f, quantize in formats.items():
        packed = quantize(w)
        found[name["dequantize"](f)] = (part(jk.dequantize, packed), ())
        found[name["matmul"](f)] = (part(jk.quantized_matmul, w=packed), (rows,))
        found[name["embedding"](f)] = (
            part(jk.quantized_embedding, ids, packed),
            (),
        )
        if f != "fp8":
            routed = part(jk.quantized_matmul_id, w=quantize(stack), ids=chosen)
            found[name["id"](f)] = (routed, (rows,))
    few = part(jk.quantized_matmul_id, w=formats["affine"](stack), ids=chosen[:1])
    found["affine_matmul_id: few"] = (few, (rows[:1],))
    return found | affine_widths(rows)


def affine_widths(rows: jax.Array) -> dict[str, Call]:
    """Products with codes of every width but 4 bits; the fused kernels are others."""

    def weights(bits: int) -> jk.AffineTensor:
        words = np.random.default_rng(0).integers(0, 2**32, (8, 2 * bits), np.uint32)
        half = np.full((8, 2), 0.5, np.float32)
        codes, *floats = map(jnp.asarray, (words, half / 2**bits, -half / 2))
        return jk.AffineTensor(codes, *floats, bits=bits, group_size=32)

    return {
        f"affine_matmul: {bits} bits": (
            part(jk.quantized_matmul, w=weights(bits)),
            (rows,),
        )
        for bits in (2, 3, 5, 6, 8)
    }


def experts_slot_by_slot(x: Draw) -> dict[str, Call]:
    """What pages take of a mixture at decode, by each kind of container."""
    chosen = jnp.array([[1, 0], [2, 1]], jnp.int32)
    kinds = {
        "dense": lambda w: w,
        "fp8": part(jk.quantize_fp8, block=(1, 0)),
        "interleaved": lambda w: jk.interleave(jk.quantize_gguf(w, "Q8_0")),
        "microscaled": part(jk.quantize_microscaled, format="mxfp4"),
    }
    found: dict[str, Call] = {}
    for name, container in kinds.items():
        gate, up, down = map(container, (x(3, 32, 64), x(3, 32, 64), x(3, 64, 32)))
        hidden = part(expert_hidden, alpha=1.0, limit=None, up_offset=0.0)
        found[f"{name}_expert_hidden"] = (
            lambda a, f=hidden, gate=gate, up=up: f(a, chosen, gate, up, None, None),
            (x(2, 64),),
        )
        found[f"{name}_expert_sum"] = (
            lambda a, p, down=down: expert_sum(a, chosen, p, down, None),
            (x(2, 2, 32), x(2, 2)),
        )
    options = dict(score="softmax", normalize=True, num_groups=1, top_groups=1)
    options |= dict(group_score="max", scaling_factor=1.0, shared=False, k=2)
    route = part(norm_route_p, eps=1e-5, **options)
    found["norm_route"] = (
        lambda a, norm, router: route(a, norm, router, None, None, None),
        (x(2, 16), x(16), x(4, 16)),
    )
    return found
