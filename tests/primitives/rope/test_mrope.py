"""mrope_cos_sin: which axis each pair reads, text, scaling, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import DynamicScaling, YarnScaling, mrope_cos_sin, rope_cos_sin

MODELS = {  # rotary_dim, sections, layout, the axis of each pair
    "qwen2_vl": (
        128,
        (16, 24, 24),
        "contiguous",
        [0] * 16 + [1] * 24 + [2] * 24,
    ),
    "qwen3_vl": (128, (24, 20, 20), "interleaved", [0, 1, 2] * 20 + [0] * 4),
    "qwen3_vl_gguf": (
        128,
        (24, 20, 20, 0),
        "interleaved",
        [0, 1, 2] * 20 + [0, 3, 3, 0],
    ),
    "qwen3_5": (64, (11, 11, 10), "interleaved", [0, 1, 2] * 10 + [0, 1]),
    "qwen3_5_gguf": (64, (11, 11, 10, 0), "interleaved", [0, 1, 2] * 10 + [0, 1]),
}


@pytest.mark.parametrize("name", MODELS)
def test_axis_of_each_pair(name):
    rotary_dim, sections, layout, axes = MODELS[name]
    # theta = 1: every pair turns by its position itself
    positions = jnp.asarray([[0.1], [0.2], [0.3], [0.4]][: len(sections)])
    _, sin = mrope_cos_sin(
        positions, rotary_dim, sections=sections, layout=layout, theta=1.0
    )
    found = np.rint(10 * np.arcsin(sin[0])) - 1
    np.testing.assert_array_equal(found, axes)


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
def test_text_is_plain_rope(layout):
    positions = jnp.asarray([[0, 5, 900], [7, 8, 9]])
    scaling = YarnScaling(4.0, 128)
    tables = mrope_cos_sin(
        jnp.stack([positions] * 3),
        16,
        sections=(3, 3, 2),
        layout=layout,
        scaling=scaling,
        freq_dim=32,
        frequency_factors=jnp.arange(1.0, 9.0),
    )
    plain = rope_cos_sin(
        positions,
        16,
        scaling=scaling,
        freq_dim=32,
        frequency_factors=jnp.arange(1.0, 9.0),
    )
    for table, expected in zip(tables, plain, strict=True):
        np.testing.assert_array_equal(table, expected)


def test_length_is_that_of_the_highest_position_on_any_axis():
    positions = jnp.asarray([[[0, 3], [0, 3]], [[0, 50], [0, 3]], [[0, 4], [0, 3]]])
    scaling = DynamicScaling(2.0, 8)
    f = jax.jit(
        lambda p: mrope_cos_sin(p, 12, sections=(2, 2, 2), theta=50.0, scaling=scaling)
    )
    for row, length in enumerate((51, 4)):
        expected = mrope_cos_sin(
            positions[:, row],
            12,
            sections=(2, 2, 2),
            theta=50.0,
            scaling=scaling,
            length=length,
        )
        for table, e in zip(f(positions), expected, strict=True):
            np.testing.assert_allclose(table[row], e, atol=1e-6)


def test_no_tokens():
    cos, sin = mrope_cos_sin(jnp.zeros((3, 2, 0), int), 8, sections=(2, 1, 1))
    assert cos.shape == sin.shape == (2, 0, 4)


def test_every_error_says_what_to_do():
    positions = jnp.zeros((3, 5), int)
    with pytest.raises(TypeError, match=r"must have dims \[axes ... t\]"):
        mrope_cos_sin(jnp.zeros(3, int), 8, sections=(2, 1, 1))
    with pytest.raises(ValueError, match=r"sections \(2, 2\) for 3 axes"):
        mrope_cos_sin(positions, 8, sections=(2, 2))
    with pytest.raises(ValueError, match=r"sections \(0, 0, 0\) for 3 axes"):
        mrope_cos_sin(positions, 8, sections=(0, 0, 0))
    with pytest.raises(ValueError, match=r"layout 'chunked' is not"):
        mrope_cos_sin(positions, 8, sections=(2, 1, 1), layout="chunked")
    with pytest.raises(ValueError, match=r"for 3 or 4 axes, got 2"):
        mrope_cos_sin(positions[:2], 8, sections=(2, 2), layout="interleaved")
    with pytest.raises(ValueError, match=r"rotary_dim 5 is not even"):
        mrope_cos_sin(positions, 5, sections=(2, 1, 1))
