"""Kinds of caches: what a codec changes is its own error, in every page and call."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    Float8Codec,
    IntCodec,
    TurboQuantCodec,
    quantize_straight_through,
    update_kv_cache,
)
from jaxkern.cpu.cpu_call import missing
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.models.cache_kind import FORMS, cache_bytes, cache_form, new_cache
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.conversation import Conversation
from jaxkern.models.generate import Generator, generate
from jaxkern.models.mixers.short_conv import ShortConv
from jaxkern.primitives.kv_cache import kv_cache

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {path.name: path for path in GOLDEN.glob("transformers_*/*")}
# Plain, with windows, a hybrid: dims of a head, and the most by which the error
# of keys and values may grow in logits; found: 3.0 to 4.2, 1.3 to 1.5, 0.3 to 0.4.
SIZES = {"llama": (8, 5.0), "gemma3": (16, 2.0), "lfm2": (8, 0.5)}
full = pytest.mark.full


@functools.cache
def loaded(name):
    return *load(FOLDERS[name], "f32"), np.load(FOLDERS[name] / "golden.npz")["tokens"]


def logits_of(name, kind, tokens=None, **changes):
    """`[t, v]`, after each token of the golden text."""
    config, weights, text = loaded(name)
    config = dataclasses.replace(config, **changes)
    tokens = text[None] if tokens is None else tokens

    @jax.jit
    def run(weights, tokens):
        page = page_of(config)
        cache = new_cache(config, *tokens.shape, kind)
        x, _ = page.hidden_states(config, weights, tokens, cache)
        return page.logits(config, weights, x)

    return np.asarray(run(weights, tokens))[0]


exact_logits = functools.cache(functools.partial(logits_of, kind="f32"))


def error(actual, expected):
    """Root of the mean square, relative."""
    return np.sqrt(np.mean((actual - expected) ** 2) / np.var(expected))


def codec_error(kind, dims):
    """What the codec makes of normal vectors: of TurboQuant lloyd_max_error ** 0.5."""
    x = jax.random.normal(jax.random.key(0), (4096, dims))
    return error(*map(np.asarray, (quantize_straight_through(x, cache_form(kind)), x)))


@pytest.mark.parametrize(
    "name, kind",
    [
        ("llama", "int8"),
        ("lfm2", "int8"),
        pytest.param("gemma3", "int8", marks=full),
        *(
            pytest.param(name, kind, marks=full)
            for name in SIZES
            for kind in ("int4", "turboquant4", "turboquant3", "float8", "turboquant8")
        ),
    ],
)
def test_logits_are_off_by_the_error_of_the_codec(name, kind):
    exact, found = exact_logits(name), logits_of(name, kind)
    dims, amplified = SIZES[name]
    assert 0 < error(found, exact) <= amplified * codec_error(kind, dims)
    if kind == "int8":
        assert (found.argmax(-1) == exact.argmax(-1)).mean() >= 0.95


@full
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_floats(kind):
    expected = exact_logits("llama")
    assert 0 < error(logits_of("llama", kind), expected) < 0.02


@pytest.mark.parametrize(
    "name, kind",
    [
        ("gemma4", "turboquant4"),  # windows, layers that read another one's keys
        pytest.param("lfm2", "turboquant4", marks=full),
        pytest.param("gpt_oss", "int8", marks=full),  # sinks and windows
        pytest.param("qwen3_vl", "int4", marks=full),
        pytest.param("qwen3_next", "turboquant3", marks=full),
    ],
)
def test_attention_reads_keys_and_values_as_the_codec_keeps_them(
    name, kind, monkeypatch
):
    """The same logits by a float32 cache of vectors that went through the codec.

    Up to a code that falls otherwise, where two programs round at a tie: far less than
    what a codec costs, which is 0.01 to 0.5 here.
    """
    found = logits_of(name, kind)

    def kept(cache, new, *slots, **options):
        new = quantize_straight_through(new, cache_form(kind))
        return update_kv_cache(cache, new, *slots, **options)

    monkeypatch.setattr(kv_cache, "update_kv_cache", kept)
    expected = logits_of(name, "f32")
    assert error(found, expected) < 1e-3


def test_pages_that_fuse_write_the_same_codes():
    """`attend_in_one` of pages whose products have kernels on GPUs."""
    plain, fused = (logits_of("llama", "int8", fused=f) for f in (False, True))
    assert error(fused, plain) < 0.05 * error(plain, exact_logits("llama"))


@pytest.mark.parametrize("name", ["llama", pytest.param("lfm2", marks=full)])
def test_rows_alone_and_together_in_pieces_or_whole(name):
    """A row's codes and logits do not depend on other rows, nor on how it was cut."""
    config, weights, text = loaded(name)
    read = jax.jit(prefill, static_argnums=0)
    lengths = np.array([9, 5], np.int32)
    rows = np.stack([text[:12], text[20:32]])
    rows[1, 5:] = 3  # padding
    empty = new_cache(config, 2, 16, "turboquant4")
    logits, together = read(config, weights, rows, lengths, empty)
    for row in (0, 1):
        alone = np.full_like(rows, 7)
        alone[row, : lengths[row]] = rows[row, : lengths[row]]
        own, cache = read(config, weights, alone, lengths, empty)
        np.testing.assert_array_equal(logits[row], own[row])
        for x, y in zip(*map(jax.tree.leaves, (together, cache)), strict=True):
            np.testing.assert_array_equal(x[row], y[row])
    step = jax.jit(decode, static_argnums=0)
    for i in range(3):  # the second row reads no more
        tokens, goes_on = rows[:, 9 + i], np.array([1, 0])
        after, together = step(config, weights, tokens, together, goes_on)
    whole, _ = read(config, weights, rows, np.array([12, 5], np.int32), empty)
    assert error(after[0], whole[0]) < 1e-2  # of a code at a tie
    np.testing.assert_array_equal(together[0].lengths, [12, 5])


def test_answers_and_what_they_run_on():
    config, weights, text = loaded("llama")
    sizes = dict(batch=2, prompt_slots=9, max_tokens=24, chunk=23)
    generator = Generator(config, weights, **sizes, cache=IntCodec(8))
    prompts = [text[:9].tolist(), text[:5].tolist()]
    found = np.concatenate(list(generator.stream(prompts)), axis=1)
    greedy = np.load(FOLDERS["llama"] / "golden.npz")["greedy"]
    assert (found[0] == greedy[:24]).mean() >= 0.9
    step = generator.executables["decode"].as_text()
    assert "u8[2,32,2,8]" in step and not re.search(r"= u8\[2,32,2,8\].* copy\(", step)
    for explanation in generator.explain().values():
        runs = {row.op: row.runs for row in explanation.rows}
        assert "attention" not in runs and "update_kv_cache" not in runs
        name = "xla" if missing() else "cpp"
        assert runs["quantized_cache_attention"].startswith(f"{name}: ")


@full
def test_a_conversation_says_what_a_generator_does():
    config, weights, text = loaded("llama")
    prompt = text[:9].tolist()
    talk = Conversation(config, weights, slots=32, cache="int8")
    tokens = [t for part in talk.answer(prompt, max_tokens=8) for t in part]
    answers = generate(config, weights, [prompt], max_tokens=8, cache="int8")
    assert answers == [tokens]


def test_bytes():
    """8 bits and a scale a vector; 4 bits and a scale a group; the lengths."""
    config, *_ = loaded("llama")  # 2 layers, 2 heads of 8 dims
    vectors = 2 * 2 * 2 * 16
    rows = {"f32": 32, "bf16": 16, "int8": 12, "int4": 8, "turboquant3": 7}
    for kind, size in rows.items():
        cache = jax.eval_shape(lambda kind=kind: new_cache(config, 1, 16, kind))
        assert cache_bytes(cache) == vectors * size + 2 * 4


def test_names():
    assert cache_form("int8") == IntCodec(8)
    assert cache_form("int4") == IntCodec(4, group=32)
    assert cache_form("float8") == Float8Codec()
    assert cache_form("turboquant2.25") == TurboQuantCodec(2.25)
    assert cache_form(TurboQuantCodec(4, seed=1)) == TurboQuantCodec(4, seed=1)
    assert cache_form(jnp.bfloat16) == cache_form("bf16") == "bfloat16"
    assert len(FORMS) == 20


@pytest.mark.parametrize("kind", ["int9", "turboquant", "float64", "q8_0", 8, ""])
def test_an_unknown_kind(kind):
    config, *_ = loaded("llama")
    with pytest.raises(
        ValueError, match=r"^cache: must be one of f32, f16, bf16, int8,"
    ):
        new_cache(config, 1, 8, kind)


def test_models_that_have_no_such_layer():
    config, weights, _ = loaded("kimi_linear")
    sizes = dict(batch=1, prompt_slots=4, max_tokens=2)
    with pytest.raises(
        ValueError, match=r"^cache: latents have no quantised form, got"
    ):
        Generator(config, weights, **sizes, cache="int8")
    assert new_cache(config, 1, 8, "f16")[-1].rows.dtype == jnp.float16
    config, *_ = loaded("lfm2")
    bare = [m for m in config.mixers if isinstance(m, ShortConv)]
    config = dataclasses.replace(config, mixers=tuple(bare))
    message = "^cache: no layer of this lfm2 keeps keys and values, which int8 is for"
    with pytest.raises(ValueError, match=message):
        new_cache(config, 1, 8, "int8")


def test_heads_that_a_codec_does_not_fit():
    config, *_ = loaded("llama")
    config = dataclasses.replace(config, head_dim=80)
    with pytest.raises(TypeError, match=r"80 dims do not fit IntCodec\(bits=4"):
        Conversation(config, None, slots=8, cache="int4")
    with pytest.raises(TypeError, match="must be a power of two, got 80"):
        new_cache(config, 1, 8, "turboquant4")
