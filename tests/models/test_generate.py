"""generate: what it writes equals single steps; executables are counted."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.cpu.cpu_call import missing
from jaxkern.formats.gguf import read_gguf
from jaxkern.models import decode_loop
from jaxkern.models.generate import NO_TOKEN, Generator, Sampling, generate
from jaxkern.models.llama import empty_cache, prefill
from jaxkern.models.loader import load_file
from tests.models.tiny_gguf import write_tiny_gguf

PROMPTS = [[5, 77, 200, 31], [9], [250, 3, 3, 8, 120, 64, 7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return load_file(read_gguf(write_tiny_gguf(path, "llama")), "f32")


def greedy(model, prompt, n):
    """The likeliest token n times, each from the whole text: no cache, no loop."""
    config, weights = model
    text = list(prompt)
    read = jax.jit(prefill, static_argnums=0)
    for _ in range(n):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(text)] = text
        cache = empty_cache(config, 1, 32)
        logits, _ = read(config, weights, padded, np.array([len(text)]), cache)
        text.append(int(jnp.argmax(logits[0])))
    return text[len(prompt) :]


@contextlib.contextmanager
def count_compilations():
    """Names of what JAX compiles in the block."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("stops", [(), (3,)])
def test_a_chunk_that_is_queued_ahead_changes_no_token(model, monkeypatch, stops):
    """As on a GPU, where every other check of this file does not run: chunks are queued
    before the ones ahead are read, and one too many where all answers end."""
    answers = greedy(model, PROMPTS[0], 13)
    stop_ids = tuple(answers[i] for i in stops)
    sizes = dict(batch=1, prompt_slots=4, max_tokens=13, chunk=4, stop_ids=stop_ids)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "default_backend", lambda: "gpu")
        generator = Generator(*model, **sizes)
        run, order = generator.executables["decode"], []

        def noted(*args):
            order.append("run")
            return run(*args)

        generator.executables["decode"] = noted
        found = []
        for tokens in generator.stream(PROMPTS[:1]):
            found.append(tokens)
            order.append("read")
    tokens = np.concatenate(found, axis=1)[0].tolist()
    end = answers.index(stop_ids[0]) + 1 if stops else 13
    assert tokens == answers[:end] + [NO_TOKEN] * (len(tokens) - end)
    assert order[:4] == ["run", "read", "run", "read"]  # one ahead
    assert order.count("run") == (2 if stops else 3)


@pytest.mark.smoke
def test_greedy_batch_equals_single_steps(model):
    answers = generate(*model, PROMPTS, max_tokens=11, chunk=4)
    assert answers == [greedy(model, prompt, 11) for prompt in PROMPTS]


def test_two_executables_for_any_number_of_tokens(model):
    """All that is compiled is compiled before the first token."""
    with count_compilations() as compiled:
        generator = Generator(*model, batch=3, prompt_slots=8, max_tokens=41, chunk=8)
        assert len(compiled) == 2
        tokens = [t for seed in range(3) for t in generator.stream(PROMPTS, seed=seed)]
        assert sum(t.shape[1] for t in tokens) == 3 * 41
        assert len(compiled) == 2
    assert list(generator.executables) == ["prefill", "decode"]


def test_one_token_needs_no_decode(model):
    generator = Generator(*model, batch=1, prompt_slots=4, max_tokens=1)
    assert list(generator.executables) == ["prefill"]
    assert [t.shape for t in generator.stream([PROMPTS[0]])] == [(1, 1)]


def test_traces_once(model, monkeypatch):
    chex.clear_trace_counter()
    step = chex.assert_max_traces(decode_loop.decode, n=1)
    monkeypatch.setattr(decode_loop, "decode", step)
    generator = Generator(*model, batch=1, prompt_slots=4, max_tokens=20, chunk=4)
    for _ in range(2):
        assert len(list(generator.stream([PROMPTS[0]]))) == 6


def test_cache_is_donated_and_updated_in_place(model):
    generator = Generator(*model, batch=1, prompt_slots=4, max_tokens=20, chunk=4)
    memory = generator.executables["decode"].memory_analysis()
    config = model[0]
    row = config.kv_heads * config.head_dim * 4
    cache = 2 * config.layers * (4 + 20) * row
    assert memory.alias_size_in_bytes >= cache
    assert not cache_copies(generator, slots=4 + 20)


def cache_copies(generator, slots):
    """Copies of whole caches in the decode executable."""
    text = generator.executables["decode"].as_text()
    shape = f"f32[1,{slots},2,16]"
    return [
        line for line in text.splitlines() if f"= {shape}" in line and "copy(" in line
    ]


def test_packed_weights_are_never_decoded_all_at_once(tmp_path):
    """Not ahead of their layer, and not ahead of the loop."""
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama"))
    config, weights = load_file(file, "packed")
    generator = Generator(config, weights, batch=1, prompt_slots=4, max_tokens=8)
    largest = max(info.size for info in file.tensors.values()) * 4
    decoded = sum(info.size for info in file.tensors.values()) * 4
    for executable in generator.executables.values():
        temporary = executable.memory_analysis().temp_size_in_bytes
        assert temporary < decoded / 2
        if missing():  # the kernels decode a few rows at a time
            assert largest <= temporary


def test_stop_tokens(model):
    """A row ends at its stop token, others go on; then nothing more is computed."""
    whole = generate(*model, PROMPTS, max_tokens=16, chunk=4)
    stop = whole[0][5]
    expected = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert (
        generate(*model, PROMPTS, max_tokens=16, chunk=4, stop_ids=[stop]) == expected
    )
    generator = Generator(
        *model, batch=1, prompt_slots=4, max_tokens=16, chunk=4, stop_ids=[stop]
    )
    chunks = list(generator.stream([PROMPTS[0]]))
    first = whole[0].index(stop)
    assert len(chunks) == 1 + -(-first // 4)  # the prompt's token, then chunks up to it
    assert np.concatenate(chunks, axis=1)[0, first] == stop
    assert np.all(np.concatenate(chunks, axis=1)[0, first + 1 :] == NO_TOKEN)


def test_sampling(model):
    """Seeds repeat; temperature draws other tokens; top_k=1 is greedy again."""

    def sampler(**options):
        return Generator(
            *model,
            batch=1,
            prompt_slots=4,
            max_tokens=12,
            sampling=Sampling(**options),
        )

    def answer(generator, seed):
        chunks = list(generator.stream(PROMPTS[:1], seed=seed))
        return np.concatenate(chunks, axis=1)[0].tolist()

    free = sampler(temperature=1.0)
    assert answer(free, 1) == answer(free, 1)
    assert answer(free, 1) != answer(free, 2)
    cut = sampler(temperature=1.0, top_k=1, top_p=0.9, min_p=0.05)
    assert answer(cut, 3) == greedy(model, PROMPTS[0], 12)


def test_explain(model):
    explanations = Generator(*model, batch=1, prompt_slots=4, max_tokens=8).explain()
    for explanation in explanations.values():
        runs = {row.op: row.runs for row in explanation.rows}
        assert runs["attention"].startswith("xla: " if missing() else "cpp: ")
        assert {"rms_norm", "apply_rope", "attention", "packed_swiglu"} <= runs.keys()


def test_refusals(model):
    with pytest.raises(ValueError, match="at least 1"):
        Generator(*model, batch=1, prompt_slots=4, max_tokens=0)
    with pytest.raises(ValueError, match="more than the model's context of 512"):
        Generator(*model, batch=1, prompt_slots=500, max_tokens=13)
    generator = Generator(*model, batch=1, prompt_slots=4, max_tokens=1)
    with pytest.raises(ValueError, match="must have 1 to 4 tokens"):
        next(generator.stream([[]]))
    for wrong in (-1, 288, 2**40, 1.5, [2]):
        prompt = [wrong, wrong] if isinstance(wrong, list) else [1, wrong]
        with pytest.raises(
            ValueError, match="integers below 288, the number of tokens"
        ):
            next(generator.stream([prompt]))
    for flat in (
        generator.stream([1]),
        iter(lambda: generate(*model, [1], max_tokens=1), 0),
    ):
        with pytest.raises(
            TypeError, match=r"must be lists of tokens, .* got 1 in the"
        ):
            next(flat)
    with pytest.raises(ValueError, match="takes 1 prompts at a time, got 2"):
        next(generator.stream([[1], [2]]))
    with pytest.raises(ValueError, match="`seed` must be 32 bits wide, got 2147483648"):
        next(generator.stream([[1]], seed=2**31))
    with pytest.raises(TypeError, match=r"`seed` must be whole numbers, got 1\.5"):
        next(generator.stream([[1]], seed=1.5))
    for wrong, kind in ((2**31, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match="`stop_ids` must be"):
            generate(*model, [[1]], max_tokens=1, stop_ids=[wrong])
    assert generate(*model, [], max_tokens=1) == []
    assert generate(*model, np.zeros((0, 3), np.int32), max_tokens=1) == []
