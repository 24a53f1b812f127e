"""The loss of a whole model: float64, every transform, packed texts, what is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.train import next_token_loss, readable
from tests.models.test_architectures import FOLDERS, model_type
from tests.train.tiny_llama import CONFIG, batches, plain_loss, weights_of

ONE = dataclasses.replace(CONFIG, layers=1)
TOKENS = batches(1, rows=3)[0]


def mean(weights, tokens):
    return next_token_loss(ONE)(weights, tokens)[0]


def test_gradient_and_transforms_of_the_whole_model():
    """In float64 at once: gradient, jvp, Hessian times a vector, and of each row."""
    with jax.enable_x64(True):
        w, v = (
            jax.tree.map(lambda x: x.astype(jnp.float64), weights_of(seed, layers=1))
            for seed in (0, 1)
        )
        rows = TOKENS[:, None]

        def all_of(loss):
            grad = jax.grad(loss)
            return dict(
                grad=grad(w, TOKENS),
                jvp=jax.jvp(lambda w: loss(w, TOKENS), (w,), (v,)),
                hvp=jax.jvp(lambda w: grad(w, TOKENS), (w,), (v,))[1],
                each=jax.vmap(grad, (None, 0))(w, rows),
            )

        found = jax.jit(lambda: all_of(mean))()
        truth = jax.jit(lambda: all_of(plain_loss))()
        for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
            # angles of rotations are float32, which is all that is between them
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        assert max(abs(x).max() for x in jax.tree.leaves(truth["hvp"])) > 1e-3
    narrow = jax.jit(jax.grad(mean))(weights_of(layers=1), TOKENS)
    for a, b in zip(*map(jax.tree.leaves, (narrow, truth["grad"])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


def test_packed_texts_are_the_texts():
    """Two texts in a row, and a masked one, against each alone."""
    w, loss = weights_of(layers=1), jax.jit(next_token_loss(ONE))
    a, b = TOKENS[0, :5], TOKENS[1, :7]
    row = np.concatenate([a, b])[None]
    segments = np.array([[4] * 5 + [1] * 7])
    packed, n = loss(w, {"tokens": row, "segment_ids": segments})
    (first, n_first), (second, n_second) = loss(w, a[None]), loss(w, b[None])
    assert (n, n_first, n_second) == (10, 4, 6)
    np.testing.assert_allclose(packed * n, first * 4 + second * 6, rtol=1e-5)
    of_b = {"tokens": row, "segment_ids": segments, "mask": segments == 1}
    masked, n = loss(w, of_b)
    assert n == 6
    np.testing.assert_allclose(masked, second, rtol=1e-5)
    nothing, n = loss(w, {"tokens": row, "mask": np.zeros((1, 12), bool)})
    assert nothing == 0 and n == 0


def test_a_decoder_of_mixed_layers():
    """Its logits have a scale and no cap; the pages above have a cap and no scale."""
    folder = FOLDERS["granitemoehybrid"]
    config, weights = load(folder, "train")
    golden = np.load(folder / "golden.npz")
    assert config.logit_scale != 1
    tokens = golden["tokens"]
    found, count = jax.jit(next_token_loss(config))(weights, tokens[None])
    losses = jax.nn.logsumexp(golden["logits"], axis=-1)[:-1]
    losses -= golden["logits"][np.arange(len(tokens) - 1), tokens[1:]]
    assert count == len(tokens) - 1
    np.testing.assert_allclose(found, losses.mean(), rtol=1e-5)


def test_what_is_kept_costs_memory_and_changes_no_gradient():
    config = dataclasses.replace(CONFIG, layers=2)
    w, tokens = weights_of(), batches(1, rows=4, length=64)[0]
    grads, sizes = {}, {}
    for remat in ("none", "products", "attention", "full"):
        loss = next_token_loss(config, remat=remat)
        f = jax.jit(jax.grad(lambda w, t, loss=loss: loss(w, t)[0]))
        compiled = f.lower(w, tokens).compile()
        sizes[remat] = compiled.memory_analysis().temp_size_in_bytes
        grads[remat] = compiled(w, tokens)
    for remat in sizes:
        for a, b in zip(*map(jax.tree.leaves, (grads[remat], grads["none"]))):  # noqa: B905
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert sizes["none"] > sizes["products"] > sizes["attention"] > sizes["full"], sizes


@pytest.mark.parametrize(
    ("batch", "message"),
    [({"token": TOKENS}, "a mapping of tokens, .*, got token")],
)
def test_another_batch_is_refused(batch, message):
    with pytest.raises(ValueError, match=f"^next_token_loss: `batch` must .*{message}"):
        mean(weights_of(layers=1), batch)


def test_what_is_not_understood_is_refused():
    learned = weights_of(layers=1)._replace(rope_factors=jnp.ones(4))
    with pytest.raises(ValueError, match="rope_factors` must be None"):
        mean(learned, TOKENS)
    with pytest.raises(ValueError, match=r"`remat` must be one of none, .* 'some'"):
        next_token_loss(ONE, remat="some")(weights_of(layers=1), TOKENS)  # pyright: ignore


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_weights_of_a_folder_for_training_are_its_weights(kind):
    """Square matrices of float32 are read the other way round by a page."""
    names = [n for n, f in FOLDERS.items() if model_type(f) == kind]
    config, weights = load(FOLDERS[names[0]], "train")
    as_f32, expected = load(FOLDERS[names[0]], "f32")
    tokens = jnp.arange(6, dtype=jnp.int32)[None]

    def logits(config, weights):
        page = page_of(config)
        x, _ = page.hidden_states(config, weights, tokens)
        return page.logits(config, weights, x)

    found, truth = jax.jit(
        lambda a, b: (logits(*readable(config, a)), logits(as_f32, b))
    )(weights, expected)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"jaxkern\.train\.readable\(config, weights\)"
    ):
        logits(config, weights)
    if kind == "gemma4_text":
        with pytest.raises(ValueError, match=r"`remat` must be 'none' for gemma4"):
            next_token_loss(config, remat="full")


def test_whole_logits_are_narrow_and_give_the_gradient_of_blocks():
    """Values alone could not see float32 logits, the largest array of a step."""
    w, shape = weights_of(layers=1), (3, 12, 40)
    w = w._replace(embedding=jnp.pad(w.embedding, ((0, 8), (0, 0)), constant_values=1))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    found, dtypes = {}, {}
    for whole in (True, False):
        loss = next_token_loss(ONE, whole_logits=whole)
        f = jax.value_and_grad(lambda w, loss=loss: loss(w, TOKENS)[0])
        found[whole] = jax.jit(f)(w)
        equations = jax.make_jaxpr(f)(narrow).eqns
        results = [v.aval for e in equations for v in e.outvars]
        dtypes[whole] = {r.dtype.name for r in results if r.shape == shape}
    assert dtypes == {True: {"bfloat16"}, False: set()}
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert next_token_loss(ONE)(w, TOKENS)[0] == found[True][0]  # they are few
