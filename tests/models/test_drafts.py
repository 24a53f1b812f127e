"""Drafts: fewer calls of the model, and not one other token."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import DynamicScaling
from jaxkern.formats.gguf import read_gguf
from jaxkern.models import drafts, load
from jaxkern.models.cache_kind import new_cache
from jaxkern.models.feed_forward import Dense
from jaxkern.models.generate import NO_TOKEN, Generator, Sampling
from jaxkern.models.loader import load_file
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mamba2 import Mamba2
from jaxkern.models.mixers.mixing import Rotation
from jaxkern.models.sampling import LIKELIEST
from tests.models.test_decoder import CONFIG, random_weights
from tests.models.tiny_gguf import write_tiny_gguf

FOLDERS = Path(__file__).parents[1] / "golden" / "transformers_hybrids"
PROMPTS = [[5, 7, 2, 13, 5, 7, 2], [9]]
DRAWN = Sampling(0.9, top_k=20, min_p=0.01, repetition=1.2, frequency=0.1)
N = 14  # tokens of an answer


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return load_file(read_gguf(write_tiny_gguf(path, "llama")), "f32")


@pytest.fixture(scope="module")
def hybrid():
    """One layer of each kind, small enough to compile in a second."""
    mixers = DeltaNet(1, 2, 4, 4, taps=4), FullAttention(2, 1, 4, Rotation(4, 1e4))
    config = replace(CONFIG, mixers=mixers, feed_forwards=(Dense(12),) * 2)
    return config, random_weights("float32", config)


@pytest.fixture(scope="module")
def qwen3_next():
    return load(FOLDERS / "qwen3_next", "f32")


@pytest.fixture(scope="module")
def in_turns(qwen3_next):
    """The same weights read as those of value heads that lie in turns."""
    config, weights = qwen3_next
    mixers = tuple(
        replace(m, by_head=False, in_turns=True) if isinstance(m, DeltaNet) else m
        for m in config.mixers
    )
    return replace(config, mixers=mixers), weights


@pytest.fixture(scope="module")
def latent():
    return load(FOLDERS / "deepseek_v3", "f32")


def answers(model, **options):
    """Those to PROMPTS, and the generator."""
    sizes = {"batch": 2, "prompt_slots": 7, "max_tokens": N, "chunk": 4}
    generator = Generator(*model, **sizes, **options)
    rows = np.concatenate(list(generator.stream(PROMPTS, seed=3)), axis=1)
    return [row[row != NO_TOKEN].tolist() for row in rows], generator


def foreseen(found):
    """In the place of `look_up`: the answers themselves, now and then another token."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, found, strict=True)]
    truth = np.zeros((2, max(map(len, texts)) + drafts.MOST), np.int32)
    for row, text in zip(truth, texts, strict=True):
        row[: len(text)] = text

    def look_up(text, known, n):
        at = known[:, None] + jnp.arange(n)
        right = jnp.take_along_axis(jnp.asarray(truth), at, axis=1)
        return jnp.where(at % 5 == 0, right ^ 1, right)

    return look_up


@pytest.mark.parametrize(
    "name, sampling, n",
    [
        ("llama", LIKELIEST, 3),
        ("hybrid", Sampling(0.9, frequency=0.1), 2),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("llama", DRAWN, 1),
                ("qwen3_next", LIKELIEST, 2),
                ("qwen3_next", DRAWN, 7),
                ("in_turns", LIKELIEST, 2),
                ("latent", Sampling(0.7), 3),
            )
        ),
    ],
)
def test_answers_are_those_without_drafts(name, sampling, n, request, monkeypatch):
    """Rows of which calls keep another number of drafts each; one ends by its stop."""
    model = request.getfixturevalue(name)
    expected, _ = answers(model, sampling=sampling)
    stop = expected[0][9]
    expected[0] = expected[0][: expected[0].index(stop) + 1]
    if stop in expected[1]:
        expected[1] = expected[1][: expected[1].index(stop) + 1]
    monkeypatch.setattr(drafts, "look_up", foreseen(expected))
    found, generator = answers(model, sampling=sampling, drafts=n, stop_ids=[stop])
    assert found == expected
    assert list(generator.executables) == ["prefill", "decode"]
    assert 1.5 < generator.timings.tokens_a_step < n + 1


@pytest.mark.full
@pytest.mark.parametrize("cache", [None, "int8"])
def test_drafts_that_the_text_has(llama, cache):
    expected, _ = answers(llama, cache=cache)
    found, generator = answers(llama, cache=cache, drafts=3)
    assert found == expected
    assert generator.timings.tokens_a_step > 1


def looked_up(text, n):
    """`look_up` of one text, token by token."""
    most, start = 1, len(text) - 1
    for at in range(1, len(text)):
        back = 0
        while (
            back < min(drafts.LONGEST_MATCH, at)
            and text[at - 1 - back] == text[-1 - back]
        ):
            back += 1
        if back >= most:
            most, start = back, at
    return [text[start + i % (len(text) - start)] for i in range(n)]


def test_what_followed_the_last_tokens_before():
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 3, (60, 12)).astype(np.int32)
    known = rng.integers(1, 13, 60).astype(np.int32)
    found = jax.jit(drafts.look_up, static_argnums=2)(texts, known, 4)
    expected = [looked_up(t[:n].tolist(), 4) for t, n in zip(texts, known, strict=True)]
    np.testing.assert_array_equal(found, expected)


def test_what_is_refused(llama, hybrid):
    """Before anything is compiled."""
    sizes = {"batch": 1, "prompt_slots": 2, "max_tokens": 2}
    with pytest.raises(ValueError, match="`drafts` must be 0 to 7, got 8"):
        Generator(*llama, **sizes, drafts=8)
    config = replace(llama[0], scaling=DynamicScaling(2.0, original_length=64))
    with pytest.raises(ValueError, match="turn: it has DynamicScaling"):
        Generator(config, llama[1], **sizes, drafts=1)
    config = replace(hybrid[0], mixers=(Mamba2(2, 4, 1, 4, 2),) * hybrid[0].layers)
    cache = jax.eval_shape(lambda: new_cache(config, 1, 4))
    with pytest.raises(ValueError, match="layer 0 of this test has Mamba2"):
        drafts.check_drafts(config, cache, 1)
