"""Decode attention over a latent cache, DeepSeek's 512 + 64 dims, bf16.

FlashInfer reads the same cache as pages of 64 tokens, and query and cache as two views
each; what it plans on the host is made before the clock runs.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

VALUE_DIM, ROTATED_DIM = 512, 64
SCALE = 192**-0.5
PAGE = 64  # tokens, of FlashInfer's


def case(b: int, s: int, n: int) -> Case:
    h = VALUE_DIM + ROTATED_DIM

    def arrays(key):
        q, x = jax.random.split(key)
        return (
            jax.random.normal(q, (b, 1, n, h), jnp.bfloat16),
            jax.random.normal(x, (b, s, h), jnp.bfloat16),
            jnp.full((b,), s, jnp.int32),
        )

    size = 2.0 * (b * s * h + b * n * (h + VALUE_DIM))
    flops = 2.0 * b * n * s * (h + VALUE_DIM)
    return Case(f"B{b} S{s} H{n}", arrays, (size, 0.0), (flops, 0.0))


def ours(query, latent, lengths):
    return jaxkern.latent_attention(
        query, latent, value_dim=VALUE_DIM, scale=SCALE, kv_lengths=lengths
    )


def flashinfer(case, query, latent, lengths):
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    (b, s, _), n = latent.shape, query.shape[2]
    workspace = torch.empty(2**27, dtype=torch.int8, device="cuda")
    attend = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    rows = torch.arange(b + 1, dtype=torch.int32, device="cuda")
    pages = torch.arange(b * s // PAGE, dtype=torch.int32, device="cuda")
    attend.plan(
        *(rows, rows * (s // PAGE), pages, lengths),
        *(n, VALUE_DIM, ROTATED_DIM, PAGE, False, SCALE),
        *(query.dtype, latent.dtype),
    )

    def f(query, latent, lengths):
        paged = latent.view(-1, PAGE, latent.shape[-1])
        parts = (query[:, 0], paged)
        own, rotated = ([p[..., :VALUE_DIM], p[..., VALUE_DIM:]] for p in parts)
        return attend.run(*own, *rotated)[:, None]

    return f


BENCHMARK = Benchmark(
    "latent_attention",
    ours,
    [
        case(128, 4096, 128),
        case(32, 4096, 128),
        case(128, 4096, 16),
        case(1, 65536, 128),
        case(1, 65536, 16),
    ],
    torch_peers={"FlashInfer": flashinfer},
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
