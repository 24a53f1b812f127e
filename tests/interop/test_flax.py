import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkern.interop.flax import dot_product_attention

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def attend(q, k, v, mask):
    scores = jnp.einsum("...tnh,...snh->...nts", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_batch_and_masks_of_numbers(batch):
    q, k, v = (draw(*batch, n, 2, 4) for n in (5, 7, 7))
    mask = jnp.asarray(RNG.random((*batch[:1], *(1,) * len(batch[1:]), 1, 5, 7)) < 0.6)
    mask = mask.at[..., 0].set(True)
    found = dot_product_attention(q, k, v, mask=mask.astype(jnp.float32))
    np.testing.assert_allclose(found, attend(q, k, v, mask), rtol=1e-5, atol=1e-5)
    found = dot_product_attention(q, k, v, is_causal=True)
    causal = jnp.tril(jnp.ones((5, 7), bool))
    np.testing.assert_allclose(found, attend(q, k, v, causal), rtol=1e-5, atol=1e-5)


def test_dropout_drops_a_share_and_not_without_need():
    x, ones = jnp.zeros((1, 64, 2, 8)), jnp.ones((1, 64, 2, 8))
    key = jax.random.key(0)
    options = dict(broadcast_dropout=False, dropout_rng=key, dropout_rate=0.5)
    dropped = dot_product_attention(x, x, ones, **options)
    assert 0.9 < dropped.mean() < 1.1 and dropped.std() > 0.05
    kept = dot_product_attention(x, x, ones, deterministic=True, **options)
    np.testing.assert_allclose(kept, 1.0, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="broadcast_dropout=False"):
        dot_product_attention(x, x, ones, dropout_rng=key, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"`dropout_rate` is 0\.5 without"):
        dot_product_attention(x, x, ones, dropout_rate=0.5, broadcast_dropout=False)


def test_dtype_promotes_and_what_it_lacks_is_refused():
    x = draw(1, 3, 2, 8)
    assert dot_product_attention(x, x, x, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    mixed = dot_product_attention(x.astype(jnp.bfloat16), x, x)
    assert mixed.dtype == jnp.float32
    for option in ("module", "einsum_dot_general"):
        with pytest.raises(NotImplementedError, match=f"`{option}` is not supported"):
            dot_product_attention(x, x, x, **{option: object()})


def test_layers_of_nnx_give_what_they_give_by_their_own():
    def layer(**options):
        return nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0), **options)

    def loss(layer, x, mask):
        return (layer(x, mask=mask) ** 2).mean()

    x = draw(2, 7, 32)
    mask = nnx.make_causal_mask(x[..., 0])
    own, ours = (
        nnx.jit(nnx.value_and_grad(loss))(layer(decode=False, **options), x, mask)
        for options in ({}, {"attention_fn": dot_product_attention})
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
        *(jax.tree.leaves(own), jax.tree.leaves(ours)),
    )
    own, ours = (
        layer(decode=True),
        layer(decode=True, attention_fn=dot_product_attention),
    )
    own.init_cache(x.shape), ours.init_cache(x.shape)
    for i in range(3):
        token = x[:, i : i + 1]
        np.testing.assert_allclose(own(token), ours(token), rtol=1e-4, atol=1e-6)


def test_a_layer_of_linen_gives_what_it_gives_by_its_own():
    own = nn.MultiHeadDotProductAttention(4)
    ours = nn.MultiHeadDotProductAttention(4, attention_fn=dot_product_attention)
    x = draw(2, 7, 32)
    weights = own.init(jax.random.key(0), x)
    mask = nn.make_causal_mask(x[..., 0])  # of float32
    np.testing.assert_allclose(
        *(layer.apply(weights, x, mask=mask) for layer in (own, ours)),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "theirs", [nnx.dot_product_attention, nn.dot_product_attention]
)
def test_every_argument_of_theirs_is_known(theirs):
    ours = inspect.signature(dot_product_attention).parameters
    names = [name for name in inspect.signature(theirs).parameters]
    unknown = [name for name in names if name not in ours and "einsum" not in name]
    assert not unknown and list(ours)[:12] == names[:12]
