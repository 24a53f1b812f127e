"""Answers that begin and end one by one equal those of each prompt alone."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.models import load
from jaxkern.models.continuous_batch import ContinuousBatch, batch_axis
from jaxkern.models.generate import Generator, Sampling, generate
from jaxkern.models.loader import load_file
from tests.models.tiny_gguf import write_tiny_gguf

PROMPTS = [[5, 77, 20, 31], [9], [25, 3, 3, 8, 12, 64, 7], [1, 2], [70, 71, 72], [4]]
LENGTHS = [9, 2, 13, 1, 6, 11]
SIZES: Any = dict(prompt_slots=8, max_tokens=13, chunk=4)
GOLDEN = "tests/golden/transformers_hybrids/"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return load_file(read_gguf(write_tiny_gguf(path, "llama")), "f32")


@pytest.fixture(scope="module")
def alone(model):
    """Each prompt's likeliest 13 tokens, from a generator of one row."""
    generator = Generator(*model, batch=1, **SIZES)
    return [
        np.concatenate(list(generator.stream([prompt])), axis=1)[0].tolist()
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def batch(model):
    return ContinuousBatch(*model, batch=2, **SIZES)


def test_rows_are_filled_again(batch, alone):
    answers = [
        batch.submit(prompt, max_tokens=n)
        for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert not answers[-1].tokens  # it waits: there are two rows
    found = [answer.result() for answer in answers]
    assert found == [tokens[:n] for tokens, n in zip(alone, LENGTHS, strict=True)]
    assert {answer.end for answer in answers} == {"length"}
    assert not batch.step()  # nothing is left to do


def test_a_prompt_may_come_while_others_are_answered(batch, alone):
    first = batch.submit(PROMPTS[0])
    tokens = iter(first)
    begun = [next(tokens) for _ in range(3)]
    later = batch.submit(PROMPTS[2])
    assert [*begun, *tokens] == alone[0]
    assert list(later) == alone[2] == list(later)


def test_a_cancelled_answer_frees_its_row(batch, alone):
    long = [batch.submit(prompt) for prompt in PROMPTS[:2]]
    assert next(iter(long[0])) == alone[0][0] and next(iter(long[1])) == alone[1][0]
    waiting = [batch.submit(PROMPTS[2]), batch.submit(PROMPTS[4])]
    waiting[0].cancel()
    long[0].cancel()
    assert waiting[1].result() == alone[4]
    assert [a.end for a in (*long, *waiting)] == [
        "cancelled",
        "length",
        "cancelled",
        "length",
    ]
    assert not waiting[0].tokens and long[0].tokens == alone[0][: len(long[0].tokens)]
    long[1].cancel()  # it had ended
    assert long[1].end == "length" and long[1].tokens == alone[1]


def test_a_stop_token_ends_an_answer_of_its_own(model, alone):
    stop = alone[0][4]
    batch = ContinuousBatch(*model, batch=2, stop_ids=[stop], **SIZES)
    answers = [batch.submit(prompt) for prompt in PROMPTS]
    for answer, tokens in zip(answers, alone, strict=True):
        there = tokens.index(stop) if stop in tokens else len(tokens)
        assert answer.result() == tokens[:there]
        assert answer.end == ("stop" if stop in tokens else "length")


def test_a_chunk_that_is_queued_ahead_changes_no_token(batch, alone, monkeypatch):
    """As on a GPU: the next chunk is asked for before the one ahead is read."""
    order, written = [], batch.executables["decode"]
    take = batch._take
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(
        batch.executables, "decode", lambda *x: order.append("ask") or written(*x)
    )
    monkeypatch.setattr(batch, "_take", lambda w: order.append("take") or take(w))
    answers = [batch.submit(prompt) for prompt in PROMPTS[:3]]
    assert [answer.result() for answer in answers] == alone[:3]
    while batch.step():
        pass
    assert order[:4] == ["ask", "ask", "take", "ask"] and order.count("ask") > 3
    assert order.count("ask") == order.count("take")


def test_draws_are_of_the_request(model):
    """Not of the row, of its neighbours, or of what the row did before."""
    sampling = Sampling(temperature=1.0, top_k=20, repetition=1.2, frequency=0.1)
    crowd = ContinuousBatch(*model, batch=3, sampling=sampling, **SIZES)
    lonely = ContinuousBatch(*model, batch=1, sampling=sampling, **SIZES)
    answers = [crowd.submit(prompt, seed=k % 3) for k, prompt in enumerate(PROMPTS)]
    for k in (5, 2, 0, 4, 3, 1):
        assert lonely.submit(PROMPTS[k], seed=k % 3).result() == answers[k].result()
    again = [lonely.submit(PROMPTS[0], seed=s).result() for s in (0, 1)]
    assert again[0] == answers[0].tokens != again[1]


def test_any_thread_may_wait(batch, alone):
    found: dict[int, list[int]] = {}

    def ask(k):
        found[k] = list(batch.submit(PROMPTS[k]))

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == dict(enumerate(alone))


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        pytest.param("gpt_oss", marks=pytest.mark.full),
        pytest.param("kimi_linear", marks=pytest.mark.full),
        pytest.param("granitemoehybrid", marks=pytest.mark.full),
    ],
)
def test_rows_leave_nothing_of_recurrent_states_and_windows(name):
    config, weights = load(GOLDEN + name, "f32")
    prompts = [[t % config.vocabulary for t in prompt] for prompt in PROMPTS]
    batch = ContinuousBatch(config, weights, batch=2, **SIZES)
    answers = [batch.submit(prompt) for prompt in prompts]
    expected = generate(config, weights, [prompts[3]], max_tokens=SIZES["max_tokens"])
    assert [answer.result() for answer in answers][3] == expected[0]


def test_a_generator_submits_to_a_batch_of_its_sizes(model, alone):
    generator = Generator(*model, batch=2, **SIZES)
    answers = [generator.submit(prompt) for prompt in PROMPTS[:3]]
    assert [answer.result() for answer in answers] == alone[:3]
    assert generator.continuous.stop_ids == generator.stop_ids
    streamed = np.concatenate(list(generator.stream(PROMPTS[:2])), axis=1)
    assert streamed.tolist() == alone[:2]


def test_rows_of_a_quantised_cache(model):
    sizes = SIZES | dict(cache="int8")
    generator = Generator(*model, batch=1, **sizes)
    batch = ContinuousBatch(*model, batch=2, **sizes)
    answers = [batch.submit(prompt) for prompt in PROMPTS[:4]]
    streamed = np.concatenate(list(generator.stream([PROMPTS[3]])), axis=1)
    assert [answer.result() for answer in answers][3] == streamed[0].tolist()


def test_the_state_is_updated_in_place(batch):
    before = batch._state.cache[0].keys
    batch.submit(PROMPTS[0]).result()
    assert before.is_deleted()


def test_refusals_come_before_anything_is_asked(batch, model, alone):
    first = batch.submit(PROMPTS[0])
    for prompt, options, message in [
        ([], {}, "1 to 8 tokens, got \\[0\\]"),
        ([1] * 9, {}, "1 to 8 tokens, got \\[9\\]"),
        ([10**6], {}, "integers below"),
        ([0.5], {}, "integers below"),
        ([1], dict(max_tokens=0), "1 to 13, those of the batch, got 0"),
        ([1], dict(max_tokens=14), "1 to 13, those of the batch, got 14"),
        ([1], dict(seed=2**31), "32 bits"),
        ([1], dict(images=["photo.jpg"]), "images"),
    ]:
        with pytest.raises(ValueError, match=message):
            batch.submit(prompt, **options)
    assert first.result() == alone[0]
    with pytest.raises(ValueError, match="at least 1"):
        ContinuousBatch(*model, batch=0, prompt_slots=8, max_tokens=8)


def test_an_answer_that_an_error_has_lost_is_not_waited_for(model, monkeypatch):
    batch = ContinuousBatch(*model, batch=1, **SIZES)

    def fails(*_):
        raise MemoryError

    monkeypatch.setitem(batch.executables, "prefill", fails)
    answer = batch.submit(PROMPTS[0])
    with pytest.raises(MemoryError):
        answer.result()
    with pytest.raises(RuntimeError, match="lost"):
        answer.result()


def test_what_does_not_grow_with_the_batch_is_shared():
    def shapes(b):
        return [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(4, b), (b,), (2, 3)]]

    assert [*map(batch_axis, shapes(2), shapes(3))] == [1, 0, None]
