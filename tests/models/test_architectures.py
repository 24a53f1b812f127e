"""Every architecture of the registry against `transformers`, in all it can do.

The list of folders is that of the registry: an architecture without one turns this red.
The tests of llama files, which were all there was, compare full forward passes with
float64; nothing compared gradients, or answers, with another program.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import cross_entropy
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.models.cached_steps import prefill
from jaxkern.models.generate import generate
from jaxkern.models.registry import ARCHITECTURES, BY_MODEL_TYPE

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    path.parent.name: path.parent for path in GOLDEN.glob("transformers_*/*/golden.npz")
}
PROMPT, SHORTER = 9, 5
LENGTHS = np.array([40, 23, 7], np.int32)


def model_type(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


def test_every_architecture_has_a_folder():
    found = {model_type(folder) for folder in FOLDERS.values()}
    assert found >= {a.model_type for a in ARCHITECTURES if a.model_type}
    assert all(a.model_type for a in ARCHITECTURES), "an architecture of GGUF alone"


@functools.cache
def loaded(name):
    """Config and weights in float32, the golden arrays."""
    return *load(FOLDERS[name], "f32"), dict(np.load(FOLDERS[name] / "golden.npz"))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_training(name):
    """Logits and a gradient of the forward pass without a cache."""
    config, weights, golden = loaded(name)
    page, tokens = page_of(config), jnp.array(golden["tokens"])[None]
    # the table is as in the file, where bfloat16 would round its gradient
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)

    def loss(weights):
        x, cache = page.hidden_states(config, weights, tokens)
        assert cache is None
        y = page.logits(config, weights, x)
        return cross_entropy(y[0, :-1], tokens[0, 1:]).mean(), y[0]

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(weights)
    assert np.std(golden["logits"]) > 0.3  # random weights still say something
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
    truth = golden["embedding_grad"]
    assert np.abs(truth).max() > 1e-2
    np.testing.assert_allclose(
        embedding_grad(FOLDERS[name], grads), truth, rtol=0, atol=1e-4
    )


def embedding_grad(folder, grads):
    """Of the table; if it is the output too, of both together."""
    config = json.loads((folder / "config.json").read_text())
    if not config.get("tie_word_embeddings"):
        return grads.embedding
    (output,) = grads.output
    return grads.embedding + (output.T if config["vocab_size"] > 32 else output)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_ragged_prompts(name):
    """What a row says does not depend on the others, nor on what stands behind it."""
    config, weights, golden = loaded(name)
    rows = np.stack([golden["tokens"]] * len(LENGTHS))
    for row, n in zip(rows, LENGTHS, strict=True):
        row[n:] = 1
    cache = page_of(config).empty_cache(config, len(rows), 48)
    read = jax.jit(prefill, static_argnums=0)
    logits, after = read(config, weights, rows, LENGTHS, cache)
    np.testing.assert_allclose(
        logits, golden["logits"][LENGTHS - 1], rtol=0, atol=1e-4
    )
    assert all((np.asarray(own.lengths) == LENGTHS).all() for own in after)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_greedy_answers(name):
    """32 tokens by cached decode, beside a shorter prompt and one that ends at once."""
    config, weights, golden = loaded(name)
    prompt = golden["tokens"][:PROMPT].tolist()
    answers = generate(
        config, weights, [prompt[:SHORTER], prompt], max_tokens=32, chunk=31
    )
    assert answers[1] == golden["greedy"].tolist()


def test_model_types_of_folders_are_known():
    assert {model_type(folder) for folder in FOLDERS.values()} <= {*BY_MODEL_TYPE}
