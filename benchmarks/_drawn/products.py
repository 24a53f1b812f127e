"""Draws of products with weights: plain, packed, and those of a group of rows."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._drawn.draw import Draw, Source, in_words, normals
from benchmarks.drawn_models import CONTAINERS, SCALES, drawn

FEW = (1, 2, 3, 4, 7, 16, 33, 64)
FEATURES = (576, 1536, 2560, 2880, 4096, 11008, 14336, 28672)


def linear(source: Source) -> Draw:
    """Of few rows, of which the weights' bytes are the time."""
    d = source.size(64, 16384, FEATURES)
    f = source.size(16, min(131072, source.elements // d), FEATURES)
    rows = source.one_of(FEW)
    dtype = source.one_of(("bfloat16", "bfloat16", "float16"))
    return Draw(
        f"{rows} rows, {f}x{d} {dtype}",
        normals(dtype, (rows, d), (f, d)),
        jaxkern.linear,
    )


def quantized_matmul(source: Source) -> Draw:
    kind = source.one_of((*SCALES, *CONTAINERS))
    d = 256 * source.size(1, min(64, source.elements // 2**13))
    f = 16 * source.size(1, min(4096, max(1, source.elements // (16 * d))))
    rows = source.one_of((*FEW, 200, 700))
    dtype = source.one_of(("bfloat16", "bfloat16", "float16"))

    def arrays(key):
        return *normals(dtype, (rows, d))(key), drawn(kind, f, d)(key)

    title = f"{rows} rows, {f}x{d} {kind}, {dtype}"
    return Draw(title, arrays, jaxkern.quantized_matmul)


def grouped_matmul(source: Source) -> Draw:
    """Groups of drawn sizes, of which some are empty and rows may be left over."""
    e = source.one_of((1, 3, 8, 32, 60, 128))
    d = source.size(64, 4096, FEATURES)
    f = source.size(16, max(16, min(8192, source.elements // (e * d))), FEATURES)
    r = source.size(1, min(16384, max(1, source.elements // max(d, f))))
    share = source.one_of((0.05, 0.5, 4.0))
    sizes = source.rng.multinomial(r, source.rng.dirichlet([share] * e))
    sizes[int(source.rng.integers(e))] = 0
    dtype = source.one_of(("bfloat16", "bfloat16", "float16"))

    def arrays(key):
        x, w = normals(dtype, (r, d), (e, f, d))(key)
        return x, w * jnp.asarray(d**-0.5, dtype), jnp.asarray(sizes, jnp.int32)

    said = f"{int((sizes == 0).sum())} empty, {r - int(sizes.sum())} left over"
    return Draw(
        f"{r}x{d}x{f} in {e} groups, {said}, {dtype}",
        arrays,
        jaxkern.grouped_matmul,
        floats=(0, 1),
    )


def embedding_gradient(source: Source) -> Draw:
    """The whole table's, of tokens of which half may be the same."""
    v, d = source.matrix(16, 8192)
    tokens = source.size(1, max(1, min(65536, source.elements // d)), (700, 8192))
    frequent = source.one_of((None, 0.5))
    dtype = source.one_of(("bfloat16", "float32"))

    def arrays(key):
        ids, same = jax.random.split(key)
        drawn_ids = jax.random.randint(ids, (tokens,), 0, v)
        is_same = jax.random.uniform(same, (tokens,)) < (frequent or 0)
        table, dy = normals(dtype, (v, d), (tokens, d))(key)
        return jnp.where(is_same, 0, drawn_ids), table, dy

    def f(ids, table, dy):
        def rows(table):
            return jaxkern.embedding(ids, table, out_of_bounds="clip")

        return jax.vjp(rows, table)[1](dy)

    title = f"{tokens} of {in_words(v, d, frequent=frequent)} {dtype}"
    return Draw(title, arrays, f)


GENERATORS = {
    "linear": linear,
    "quantized_matmul": quantized_matmul,
    "grouped_matmul": grouped_matmul,
    "embedding_gradient": embedding_gradient,
}
