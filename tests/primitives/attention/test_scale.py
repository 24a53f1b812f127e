"""Traced scales and pair windows, in `attention` and in every form over a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    attention,
    latent_attention,
    paged_attention,
    quantized_cache_attention,
)
from tests.primitives.attention.test_attention import draw

WINDOWS = [(2, 1), (0, None), (None, 2)]


@pytest.mark.parametrize("window", WINDOWS)
def test_pair_windows_and_traced_scales_of_every_form(window):
    """Each form is attention over the same keys, with the keys of the window alone."""
    q, rows = (jnp.asarray(draw(2, n, h, 8), jnp.float32) for n, h in ((3, 4), (9, 1)))
    lengths, at = jnp.array([9, 6]), jnp.array([4, 2])
    left, right = (99 if x is None else x for x in window)
    ahead = jnp.arange(9) - (at[:, None] + jnp.arange(3))[..., None]
    mask = ((ahead >= -left) & (ahead <= right))[:, None]
    tables = jnp.arange(6).reshape(2, 3)
    pages = rows.reshape(6, 3, 1, 8)
    options = dict(window=window, q_offset=at)

    def each(scale):
        given = dict(options, scale=scale)
        inside = dict(given, kv_lengths=lengths)
        latent = latent_attention(q, rows[:, :, 0], value_dim=8, **inside)
        return [
            attention(q, rows, rows, mask=mask, kv_lengths=lengths, scale=scale),
            attention(q, rows, rows, **inside),
            latent,
            quantized_cache_attention(q, rows, rows, **inside),
            paged_attention(q, pages, pages, tables, lengths, causal=False, **given),
        ]

    if window != WINDOWS[0]:
        for out in (static := each(0.3)):
            np.testing.assert_allclose(out, static[0], atol=2e-6)
        return
    outs, slopes = jax.jit(lambda x: jax.jvp(each, (x,), (jnp.ones_like(x),)))(0.3)
    back = jax.jit(jax.jacrev(lambda x: jnp.stack([y.sum() for y in each(x)])))(0.3)
    for out, slope, total in zip(outs, slopes, back, strict=True):
        np.testing.assert_allclose(out, outs[0], atol=2e-6)
        np.testing.assert_allclose(slope, slopes[0], atol=2e-6)
        np.testing.assert_allclose(total, slopes[0].sum(), atol=2e-5)


def test_the_last_tokens_of_a_page_table_with_a_pair_window():
    """Without q_offset queries are the last tokens; one alone sees all before it."""
    q, rows = (jnp.asarray(draw(1, n, 1, 4), jnp.float32) for n in (2, 6))
    pages, tables, lengths = rows.reshape(2, 3, 1, 4), jnp.array([[0, 1]]), 5
    for t in (1, 2):
        found = paged_attention(
            q[:, :t], pages, pages, tables, jnp.array([5]), causal=False, window=(1, 3)
        )
        p = lengths - t + np.arange(t)[:, None]
        j = np.arange(6)
        mask = jnp.asarray((p - 1 <= j) & (j <= p + 3) & (j < lengths))
        expected = attention(q[:, :t], rows, rows, mask=mask)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_scales_and_windows_that_are_none():
    q, rows = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 4, 1, 4))
    forms = {
        "latent_attention": lambda **o: latent_attention(
            q, rows[:, :, 0], value_dim=2, **{"scale": 1.0, **o}
        ),
        "quantized_cache_attention": lambda **o: quantized_cache_attention(
            q, rows, rows, **o
        ),
        "paged_attention": lambda **o: paged_attention(
            q, rows, rows, jnp.zeros((1, 1), int), jnp.array([4]), **o
        ),
    }
    for name, form in forms.items():
        with pytest.raises(TypeError, match=f"{name}: `scale` must be"):
            jax.jit(lambda x, form=form: form(scale=x))(jnp.ones(2))
        with pytest.raises(ValueError, match=f"{name}: window is .* two whole"):
            form(window=(-1, 2))
        with pytest.raises(TypeError, match=f"{name}: `window` must be a static int"):
            jax.jit(lambda x, form=form: form(window=x))(2)
