"""Causal attention of many queries: cuDNN, FA3, jla, tokamax, torch, XLA and ours."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

WINDOW = 1024
DOCUMENT = 1024  # tokens, of those packed into one sequence
CHECKED = 2048  # tokens up to which scores in float64 fit


def case(b: int, t: int, n: int, k: int, h: int, window: int | None = None) -> Case:
    def arrays(key):
        shapes = [(b, t, n, h), (b, t, k, h), (b, t, k, h)]
        keys = jax.random.split(key, 3)
        return tuple(
            jax.random.normal(one, shape, jnp.bfloat16)
            for one, shape in zip(keys, shapes, strict=True)
        )

    width = min(window or t, t)
    pairs = b * n * (t * width - width * (width - 1) / 2)
    queries, keys = 2.0 * b * t * n * h, 2.0 * b * t * k * h
    large = t > CHECKED
    return Case(
        f"b{b}_s{t}_d{h}",
        arrays,
        (2 * queries + 2 * keys, 4 * queries + 4 * keys),
        (4 * pairs * h, 10 * pairs * h),
        reference=not large,
        checked=case(1, CHECKED, n, k, h, window) if large else None,
    )


def documents(b: int, t: int, n: int, k: int, h: int) -> Case:
    """Sequences of `t / DOCUMENT` documents that do not see each other."""
    whole = case(b, t, n, k, h)
    one = case(b, DOCUMENT, n, k, h)

    def arrays(key):
        ids = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32) // DOCUMENT, (b, t))
        return *whole.arrays(key), ids

    forward, backward = (x * (t // DOCUMENT) for x in one.flops)
    return Case(
        f"{whole.name}_documents",
        arrays,
        whole.bytes,
        (forward, backward),
        reference=whole.reference,
        checked=documents(1, CHECKED, n, k, h) if whole.checked else None,
    )


def ours_packed(q, k, v, ids):
    return jaxkern.attention(q, k, v, causal=True, segment_ids=ids)


def cudnn_packed(q, k, v, ids):
    seen = ids[:, None, :, None] == ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        q, k, v, mask=seen, is_causal=True, implementation="cudnn"
    )


def ours(window, q, k, v):
    return jaxkern.attention(q, k, v, causal=True, window=window)


def cudnn(window, q, k, v):
    sizes = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=sizes, implementation="cudnn"
    )


def by_torch(backend, case, *tensors):
    """torch's attention, by a backend of SDPBackend's names."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def f(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend[backend]):
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads_first, is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
            )
        return out.transpose(1, 2)

    return f


def flash_attention_3(window, q, k, v):
    from dew_flash_attn import flash_mha

    sizes = {} if window is None else dict(window_size=(window - 1, 0))
    return flash_mha(q, k, v, is_causal=True, **sizes)


def jla(window, q, k, v):
    from jla.ops.mosaic_gpu.attention import flash_attention

    sizes = {} if window is None else dict(sliding_window=window)
    return flash_attention(q, k, v, backward="ranged", **sizes)


def tokamax(window, q, k, v):
    from tokamax import dot_product_attention

    sizes = {} if window is None else dict(local_window_size=(window - 1, 0))
    return dot_product_attention(
        q, k, v, is_causal=True, implementation="mosaic", **sizes
    )


def benchmark(name: str, window: int | None, cases: list[Case]) -> Benchmark:
    torch_peers: dict[str, Callable] = {}
    if window is None:
        torch_peers["torch flash"] = functools.partial(by_torch, "FLASH_ATTENTION")
    return Benchmark(
        name,
        functools.partial(ours, window),
        cases,
        together=True,
        torch_peers=torch_peers,
        jax_peers={
            "cuDNN": functools.partial(cudnn, window),
            "FA3": functools.partial(flash_attention_3, window),
            "jla": functools.partial(jla, window),
            "tokamax": functools.partial(tokamax, window),
        },
    )


BENCHMARK = benchmark(
    "attention",
    None,
    [
        case(4, 4096, 32, 8, 128),
        case(1, 16384, 32, 8, 128),
        case(4, 4096, 32, 8, 64),
        case(4, 4096, 16, 8, 256),
        case(4, 1024, 32, 8, 128),
        case(8, 128, 32, 8, 128),
        case(1, 64, 8, 8, 64),
        case(4, 4096, 16, 16, 72),
        case(4, 4096, 16, 16, 80),
        case(8, 700, 32, 8, 128),
    ],
)
WINDOWED = benchmark(
    "attention_window", WINDOW, [case(1, 16384, 32, 8, 128, window=WINDOW)]
)

PACKED = Benchmark(
    "attention_documents",
    ours_packed,
    together=True,
    cases=[documents(1, 16384, 32, 8, 128), documents(4, 4096, 32, 8, 128)],
    jax_peers={"cuDNN, mask": cudnn_packed},
)


WIDE = Benchmark(
    "attention_wide_heads",
    functools.partial(ours, None),
    [case(1, 4096, 16, 16, h) for h in (320, 384, 512)],
    differentiable=False,
)


def latent_prefill(b: int, t: int, n: int) -> Case:
    """Heads of 192 dims and values of 128, as of a latent cache written out."""
    whole = case(b, t, n, n, 192)

    def arrays(key):
        q, k, v = whole.arrays(key)
        return q, k, v[..., :128]

    forward, backward = 2.0 * b * t * n * (2 * 192 + 2 * 128), whole.flops[1]
    flops = whole.flops[0] * (192 + 128) / 384, backward * (3 * 192 + 2 * 128) / 960
    small = latent_prefill(1, CHECKED, n) if whole.checked else None
    sizes = forward, 2 * forward
    name = f"b{b}_s{t}_d192_v128"
    return Case(name, arrays, sizes, flops, whole.reference, small)


LATENT = Benchmark(
    "attention_latent_prefill",
    functools.partial(ours, None),
    [latent_prefill(2, 4096, 32)],
    torch_peers={"cuDNN": functools.partial(by_torch, "CUDNN_ATTENTION")},
)


BENCHMARKS = [BENCHMARK, WINDOWED, PACKED, WIDE, LATENT]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
