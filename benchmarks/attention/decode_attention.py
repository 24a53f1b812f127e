"""Decode attention over a bf16 cache, one new token a sequence or several.

Ours, XLA, cuDNN, FA3 and torch. Those without lengths read the same cache: it is full.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(b: int, s: int, n: int = 32, k: int = 8, h: int = 128, t: int = 1) -> Case:
    def arrays(key):
        q, k_, v = jax.random.split(key, 3)
        return (
            jax.random.normal(q, (b, t, n, h), jnp.bfloat16),
            jax.random.normal(k_, (b, s, k, h), jnp.bfloat16),
            jax.random.normal(v, (b, s, k, h), jnp.bfloat16),
            jnp.full((b,), s, jnp.int32),
        )

    size = 2.0 * (2 * b * s * k * h + 2 * b * t * n * h)
    name = f"B{b} S{s} H{n} kv{k} D{h}" + (f" T{t}" if t > 1 else "")
    return Case(name, arrays, (size, 0.0))


def ours(query, key, value, lengths):
    return jaxkern.attention(query, key, value, kv_lengths=lengths)


def without_lengths(query, key, value, lengths):
    """All keys, as a peer without lengths."""
    del lengths
    return jaxkern.attention(query, key, value)


def paged(page: int):
    """The same cache cut into pages, in order."""

    def f(query, key, value, lengths):
        b, s, k, h = key.shape
        pages = [x.reshape(b * s // page, page, k, h) for x in (key, value)]
        tables = jnp.arange(b * s // page, dtype=jnp.int32).reshape(b, s // page)
        return jaxkern.paged_attention(query, *pages, tables, lengths)

    return f


def cudnn(query, key, value, lengths):
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def cudnn_without_lengths(query, key, value, lengths):
    del lengths
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


def flash_attention_3(query, key, value, lengths):
    from dew_flash_attn import flash_mha

    del lengths
    return flash_mha(query, key, value, is_causal=False)


def torch_attention(case, *tensors):
    """Without lengths, by the backend that torch chooses."""
    import torch

    del case, tensors

    def f(*tensors):
        query, key, value = (x.transpose(1, 2) for x in tensors[:3])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=True
        ).transpose(1, 2)

    return f


BENCHMARK = Benchmark(
    "decode_attention",
    ours,
    [
        case(32, 4096),
        case(1, 4096),
        case(1, 16384),
        case(1, 65536),
        case(1, 128),
        case(1, 512),
        case(8, 16384),
        case(128, 1024),
        case(32, 4096, n=16, k=8, h=256),
        case(32, 4096, n=64, k=8, h=64),
        case(32, 4096, n=32, k=32),
    ],
    jax_peers={
        "jaxkern, no lengths": without_lengths,
        "jaxkern, pages of 16": paged(16),
        "jaxkern, pages of 64": paged(64),
        "cuDNN": cudnn,
        "cuDNN, no lengths": cudnn_without_lengths,
        "FA3, no lengths": flash_attention_3,
    },
    torch_peers={"torch, no lengths": torch_attention},
    differentiable=False,
)

ROWS = Benchmark(
    "decode_attention_rows",
    without_lengths,
    [
        case(32, 4096, n=128, t=8),
        case(8, 16384, n=256, t=4),
        case(8, 4096, n=128, k=1, t=8),
        case(8, 4096, n=64, k=4, h=256, t=8),
        case(8, 4096, n=32, k=4, h=512),
        case(8, 4096, n=32, k=2, h=512, t=8),
        case(1, 4096, n=128, t=8),
    ],
    jax_peers={
        "jaxkern, pages of 64": paged(64),
        "cuDNN, no lengths": cudnn_without_lengths,
    },
    differentiable=False,
)
BENCHMARKS = [BENCHMARK, ROWS]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
