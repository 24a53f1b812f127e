"""Draws of operators on rows: norms, softmax, gates, rotations, running sums."""

import math
from collections.abc import Callable

import jax.numpy as jnp

import jaxkern
from benchmarks._drawn.draw import Draw, Source, in_words, normals, with_options

WIDEST = 2**20
LONG = (10**6, 131072, 50257)


def norm(f: Callable, tensors: int, vectors: tuple[int, int]) -> Callable:
    """Draws of a norm of so many `[rows, d]`, and of a number of `[d]` between two."""

    def draw(source: Source) -> Draw:
        rows, d = source.matrix(16, 2**17)
        count = int(source.rng.integers(vectors[0], vectors[1] + 1))
        dtype = source.dtype()
        shapes = [(rows, d)] * tensors + [(d,)] * count
        return Draw(
            f"{rows}x{d} {dtype}, {count} vectors",
            normals(dtype, *shapes),
            f,
            floats=tuple(range(len(shapes))),
            slack=4.0,
        )

    return draw


def group_norm(source: Source) -> Draw:
    """Of images, channels first or last."""
    groups = source.one_of((1, 8, 32))
    channels = groups * source.size(1, 64)
    side = source.size(4, max(4, (source.elements / channels) ** 0.5 / 2))
    b = source.one_of((1, 2, 3, 8))
    axis = source.one_of((1, -1))
    shape = (b, channels, side, side) if axis == 1 else (b, side, side, channels)
    dtype = source.dtype()
    return Draw(
        f"{in_words(*shape, groups=groups, axis=axis)} {dtype}",
        normals(dtype, shape, (channels,), (channels,)),
        with_options(jaxkern.group_norm, groups=groups, axis=axis),
        floats=(0, 1, 2),
        slack=4.0,
    )


def softmax(source: Source) -> Draw:
    shape, dtype = source.matrix(8, WIDEST, LONG), source.dtype()
    softcap = 30.0 if source.chance(0.2) else None
    return Draw(
        f"{in_words(*shape, softcap=softcap)} {dtype}",
        normals(dtype, shape),
        with_options(jaxkern.softmax, softcap=softcap),
        floats=(0,),
    )


def swiglu(source: Source) -> Draw:
    shape, dtype = source.matrix(64, 65536), source.dtype()
    limit = 7.0 if source.chance(0.3) else None
    return Draw(
        f"{in_words(*shape, limit=limit)} {dtype}",
        normals(dtype, shape, shape),
        with_options(jaxkern.swiglu, limit=limit),
        floats=(0, 1),
    )


def rotated(source: Source) -> tuple[tuple[int, int, int, int], int, str]:
    """Sequences, tokens, key heads and head dim; pairs that turn; pairing."""
    h = source.one_of((64, 72, 80, 96, 128, 256))
    k, b = source.one_of((1, 2, 3, 8)), source.one_of((1, 1, 2, 3))
    t = source.size(1, source.elements // (8 * b * k * h), (700, 8192))
    turned = source.one_of((h, h, h // 4 // 2 * 2))
    return (b, t, k, h), turned // 2, source.one_of(("neox", "interleaved"))


def with_tables(arrays: Callable, tokens: int, pairs: int) -> Callable:
    def all_of_them(key):
        tables = jaxkern.rope_cos_sin(jnp.arange(tokens), 2 * pairs)
        return *arrays(key), *tables

    return all_of_them


def rope(source: Source) -> Draw:
    shape, pairs, pairing = rotated(source)
    dtype = source.dtype()
    return Draw(
        f"{in_words(*shape, pairs=pairs)} {pairing} {dtype}",
        with_tables(normals(dtype, shape), shape[1], pairs),
        with_options(jaxkern.apply_rope, pairing=pairing),
        floats=(0,),
    )


def qk_norm_rope(source: Source) -> Draw:
    (b, t, k, h), pairs, pairing = rotated(source)
    n, dtype = k * source.one_of((1, 2, 4, 5, 8)), source.dtype()
    arrays = normals(dtype, (b, t, n, h), (b, t, k, h), (h,), (h,))
    return Draw(
        f"b{b} t{t} heads {n}/{k} of {h}, {pairs} pairs {pairing} {dtype}",
        with_tables(arrays, t, pairs),
        with_options(jaxkern.qk_norm_rope, pairing=pairing),
        floats=(0, 1, 2, 3),
        slack=4.0,
    )


def cumsum(source: Source) -> Draw:
    shape = source.matrix(8, 2**22, (*LONG, 64))
    dtype = source.dtype()
    options = dict(exclusive=source.chance(0.3), reverse=source.chance(0.3))
    return Draw(
        f"{in_words(*shape, **options)} {dtype}",
        normals(dtype, shape),
        with_options(jaxkern.cumsum, **options),
        floats=(0,),
        slack=4.0,
    )


def fwht(source: Source) -> Draw:
    d = 2 ** int(source.rng.integers(3, 1 + min(15, int(math.log2(source.elements)))))
    shape, dtype = (source.size(1, source.elements // d), d), source.dtype()
    return Draw(
        f"{in_words(*shape)} {dtype}",
        normals(dtype, shape),
        jaxkern.fwht,
        floats=(0,),
        slack=4.0,
    )


GENERATORS = {
    "rms_norm": norm(jaxkern.rms_norm, 1, (0, 2)),
    "layer_norm": norm(jaxkern.layer_norm, 1, (0, 2)),
    "l2_norm": norm(jaxkern.l2_norm, 1, (0, 0)),
    "gated_rms_norm": norm(jaxkern.gated_rms_norm, 2, (0, 1)),
    "add_rms_norm": norm(jaxkern.add_rms_norm, 2, (0, 2)),
    "rms_norm_add": norm(jaxkern.rms_norm_add, 2, (0, 2)),
    "rms_norm_mul": norm(jaxkern.rms_norm_mul, 2, (0, 1)),
    "sandwich_rms_norm": norm(jaxkern.sandwich_rms_norm, 2, (2, 2)),
    "group_norm": group_norm,
    "softmax": softmax,
    "swiglu": swiglu,
    "rope": rope,
    "qk_norm_rope": qk_norm_rope,
    "cumsum": cumsum,
    "fwht": fwht,
}
