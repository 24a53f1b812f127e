"""The rotary embeddings in use, each from its formula, a number at a time in float64.

A variant is the list of its pairs, and for each pair the axis whose position it reads
and the exponent of 1 / theta.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    apply_rope,
    axial_rope,
    axial_rope_2d,
    axial_rope_cos_sin,
    mrope_cos_sin,
    rope,
)

H, T, THETA = 16, 6, 200.0  # head dim, tokens, base
POSITIONS = np.array(  # time, height, width and a fourth axis of each token
    [[0, 1, 2, 2, 2, 9], [0, 1, 2, 3, 4, 7], [0, 1, 5, 2, 3, 8], [4, 3, 1, 0, 6, 2]]
)
HEIGHT, WIDTH = 2, 3
ROW, COLUMN = np.divmod(np.arange(T), WIDTH)


def turned(x, positions, pairs, axes, exponents):
    y = np.array(x, np.float64)
    for (a, b), axis, e in zip(pairs, axes, exponents, strict=True):
        for t in range(x.shape[-3]):
            angle = positions[axis][t] * THETA**-e
            xa, xb = x[..., t, :, a], x[..., t, :, b]
            y[..., t, :, a] = xa * np.cos(angle) - xb * np.sin(angle)
            y[..., t, :, b] = xb * np.cos(angle) + xa * np.sin(angle)
    return y


def multi_axis(sections, layout, rotary_dim=H, axes=4, **pairs):
    def f(x):
        tables = mrope_cos_sin(
            jnp.asarray(POSITIONS[:axes]),
            rotary_dim,
            sections=sections,
            layout=layout,
            theta=THETA,
        )
        return apply_rope(x, *tables, **pairs)

    return f


def scalar(**options):
    return lambda x: rope(x, jnp.asarray(POSITIONS[0]), theta=THETA, **options)


def vision(sections=None):
    tables = axial_rope_cos_sin(
        jnp.asarray(np.stack([ROW, COLUMN])), H, sections=sections, theta=THETA
    )
    return lambda x: apply_rope(x, *tables)


def on_grid(pairing, *axes):
    positions = jnp.asarray(np.stack(axes))
    return lambda x: axial_rope(x, positions, pairing=pairing, theta=THETA)


def neox(pairs, offset):
    return [(i, i + offset) for i in range(pairs)]


NEIGHBOURS = [(2 * i, 2 * i + 1) for i in range(8)]
OVER_H = [2 * i / H for i in range(8)]
VISION = [4 * (i % 4) / H for i in range(8)]  # denominator H/2, restarts
VARIANTS = {  # the function, then positions, pairs, axis of each, exponent of each
    "interleaved": (
        scalar(pairing="interleaved"),
        (POSITIONS, NEIGHBOURS, [0] * 8, OVER_H),
    ),
    "neox": (scalar(), (POSITIONS, neox(8, 8), [0] * 8, OVER_H)),
    "neox proportional": (
        scalar(rotary_dim=6, pair_offset=8, freq_dim=16),
        (POSITIONS, neox(3, 8), [0] * 3, OVER_H[:3]),
    ),
    "neox partial": (
        scalar(rotary_dim=6),
        (POSITIONS, neox(3, 3), [0] * 3, [0, 2 / 6, 4 / 6]),
    ),
    "MROPE": (
        multi_axis((3, 2, 2, 1), "contiguous"),
        (POSITIONS, neox(8, 8), [0, 0, 0, 1, 1, 2, 2, 3], OVER_H),
    ),
    "MROPE of three axes": (
        multi_axis((2, 3, 3), "contiguous", axes=3),
        (POSITIONS, neox(8, 8), [0, 0, 1, 1, 1, 2, 2, 2], OVER_H),
    ),
    "MROPE that starts again": (
        multi_axis((1, 1, 1, 0), "contiguous"),
        (POSITIONS, neox(8, 8), [0, 1, 2, 0, 1, 2, 0, 1], OVER_H),
    ),
    "IMROPE": (
        multi_axis((3, 3, 2, 0), "interleaved"),
        (POSITIONS, neox(8, 8), [0, 1, 2, 0, 1, 2, 0, 1], OVER_H),
    ),
    "IMROPE, the rest to the fourth axis": (  # ggml
        multi_axis((4, 2, 2, 0), "interleaved"),
        (POSITIONS, neox(8, 8), [0, 1, 2, 0, 1, 2, 0, 3], OVER_H),
    ),
    "IMROPE, the rest to time": (  # Hugging Face
        multi_axis((4, 2, 2), "interleaved", axes=3),
        (POSITIONS, neox(8, 8), [0, 1, 2, 0, 1, 2, 0, 0], OVER_H),
    ),
    "IMROPE partial": (
        multi_axis((2, 2, 1, 0), "interleaved", rotary_dim=10),
        (POSITIONS, neox(5, 5), [0, 1, 2, 0, 1], [2 * i / 10 for i in range(5)]),
    ),
    "IMROPE partial, pairs over the head": (
        multi_axis((2, 2, 1, 0), "interleaved", rotary_dim=10, pair_offset=8),
        (POSITIONS, neox(5, 8), [0, 1, 2, 0, 1], [2 * i / 10 for i in range(5)]),
    ),
    "VISION": (
        vision(),
        ([ROW, COLUMN], neox(8, 8), [0] * 4 + [1] * 4, VISION),
    ),
    "VISION of unequal sections": (
        vision(sections=(5, 3)),
        (
            [ROW, COLUMN],
            neox(8, 8),
            [0] * 5 + [1] * 3,
            [4 * i / H for i in (0, 1, 2, 3, 4, 0, 1, 2)],
        ),
    ),
    "VISION by axial_rope": (
        on_grid("neox", ROW, COLUMN),
        ([ROW, COLUMN], neox(8, 8), [0] * 4 + [1] * 4, VISION),
    ),
    "vision 2d of Gemma 4": (
        on_grid("neox_parts", COLUMN, ROW),
        (
            [COLUMN, ROW],
            [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)],
            [0] * 4 + [1] * 4,
            VISION,
        ),
    ),
    "axial 2d of SAM 2": (
        lambda x: axial_rope_2d(x, (HEIGHT, WIDTH), theta=THETA),
        ([COLUMN, ROW], NEIGHBOURS, [0] * 4 + [1] * 4, VISION),
    ),
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_values(name):
    f, formula = VARIANTS[name]
    x = draw(2, T, 2, H)
    np.testing.assert_allclose(f(jnp.float32(x)), turned(x, *formula), atol=2e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_turns_back(name):
    """The transpose of a rotation is the rotation by the negative angle."""
    f, (positions, *pairs) = VARIANTS[name]
    x, dy = draw(2, T, 2, H), draw(2, T, 2, H, seed=1)
    back = [-np.asarray(p) for p in positions]
    (dx,) = jax.vjp(f, jnp.float32(x))[1](jnp.float32(dy))
    np.testing.assert_allclose(dx, turned(dy, back, *pairs), atol=2e-5)


def test_d37_default_pairs_are_half_the_rotary_dim_apart():
    """rotary_dim/2, as ggml and Hugging Face; one origin has head_dim/2."""
    x = jnp.float32(draw(2, T, 2, H))
    ours = VARIANTS["IMROPE partial"][0](x)
    theirs = VARIANTS["IMROPE partial, pairs over the head"][0](x)
    np.testing.assert_array_equal(ours[..., 10:], x[..., 10:])
    assert np.abs(theirs[..., 8:13] - x[..., 8:13]).max() > 0.1


def test_d11_the_denominator_is_the_rotary_dim_or_freq_dim():
    x = jnp.float32(draw(2, T, 2, H))
    proportional, partial = (
        VARIANTS[name][0](x) for name in ("neox proportional", "neox partial")
    )
    same_pairs = rope(
        x, jnp.asarray(POSITIONS[0]), theta=THETA, rotary_dim=6, freq_dim=16
    )
    assert np.abs(proportional - partial).max() > 0.1
    assert np.abs(same_pairs - partial).max() > 0.1
