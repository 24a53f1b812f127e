"""A conversation reads only what is new, and says what reading all would have said."""

import numpy as np
import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.models import conversation as module
from jaxkern.models.conversation import Conversation
from jaxkern.models.generate import Generator
from jaxkern.models.loader import load_file
from jaxkern.models.sampling import Sampling
from tests.models.tiny_gguf import write_tiny_gguf

PROMPT, MORE = [5, 77, 200, 31, 9, 250, 3, 3, 8, 120, 64, 7], [44, 10, 9, 12]
NEW = 10  # 1 with the prompt, 2 chunks of 4, 1 alone
PENALTIES = Sampling(repetition=1.5, presence=0.3, frequency=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return load_file(read_gguf(write_tiny_gguf(path, "llama")), "f32")


@pytest.fixture(scope="module")
def anew(model):
    """Answers to whole texts, by executables that all tests share."""
    generators = {
        sampling: Generator(
            *model, batch=1, prompt_slots=32, max_tokens=NEW, sampling=sampling
        )
        for sampling in (module.LIKELIEST, PENALTIES)
    }

    def answer(ids, sampling=module.LIKELIEST):
        return np.concatenate(list(generators[sampling].stream([ids])), 1)[0].tolist()

    return answer


@pytest.fixture(scope="module")
def shared(model):
    return Conversation(*model, slots=64)


@pytest.fixture
def talk(shared, monkeypatch):
    monkeypatch.setattr(module, "PIECES", (8,))
    shared.forget()
    shared.sampling = module.LIKELIEST
    return shared


def said(talk, ids, **options):
    return [t for tokens in talk.answer(ids, **options) for t in tokens]


def test_two_turns_are_one_text(talk, anew):
    first = said(talk, PROMPT, max_tokens=NEW)
    assert first == anew(PROMPT)
    assert (talk.ids, talk.kept) == ([*PROMPT, *first], 0)
    text = [*PROMPT, *first, *MORE]
    second = said(talk, text, max_tokens=NEW)
    assert talk.kept == len(PROMPT) + len(first) - 1, "the last token was not read yet"
    assert talk.timings.prefill_tokens == 1 + len(MORE)
    assert second == anew(text)
    third = said(talk, MORE, max_tokens=NEW)  # another text: read anew
    assert (talk.kept, third) == (0, anew(MORE))


def test_who_leaves_goes_on_where_he_was(talk, anew):
    for _ in talk.answer(PROMPT):
        if len(talk.ids) > len(PROMPT) + 3:
            break
    text = [*talk.ids, *MORE]
    assert len(text) == len(PROMPT) + 5 + len(MORE)
    second = said(talk, text, max_tokens=NEW)
    assert talk.kept == len(text) - len(MORE) - 1
    assert second == anew(text)


def test_a_stop_token_ends_and_is_not_part_of_the_text(model, anew):
    answer = anew(PROMPT)
    stop = answer[6]
    before = answer[: answer.index(stop)]
    talk = Conversation(*model, slots=64, stop_ids=(stop,))
    assert said(talk, PROMPT, max_tokens=9) == [*before, stop]
    assert talk.ids == [*PROMPT, *before]
    said(talk, [*talk.ids, *MORE], max_tokens=1)
    assert talk.kept == len(PROMPT) + len(before)


def test_penalties_follow_the_text(talk, anew):
    """Both turns, and a prompt in pieces, count as one text that was read at once."""
    talk.sampling = PENALTIES
    first = said(talk, PROMPT, max_tokens=NEW)
    assert first != anew(PROMPT)
    text = [*talk.ids, *MORE]
    for prompt, answer in (PROMPT, first), (text, said(talk, text, max_tokens=NEW)):
        assert answer == anew(prompt, PENALTIES)


def test_the_slots_are_the_limit(model):
    talk = Conversation(*model, slots=17)
    assert len(said(talk, PROMPT)) == 5
    with pytest.raises(ValueError, match=r"the text has 17 tokens, the cache 17 slots"):
        said(talk, list(range(17)))
    with pytest.raises(
        ValueError, match="2 to 512 slots, the model's context, got 513"
    ):
        Conversation(*model, slots=513)
    with pytest.raises(ValueError, match=r"tokens in \[0, 288\), at least one"):
        said(talk, [288])
    with pytest.raises(ValueError, match="`max_tokens` must be at least 1, got 0"):
        said(talk, PROMPT, max_tokens=0)


def test_penalised_logits_by_hand():
    seen = module.Seen.of_prompts(
        np.array([[0, 1, 9]]), np.array([2]), 4
    )  # 9 does not count
    seen = seen.after(np.array([3])).after(np.array([3]))
    logits = np.array([[2.0, -1.0, 1.0, 4.0]], np.float32)
    sampling = Sampling(repetition=2.0, presence=0.5, frequency=0.25)
    penalised = sampling.penalised(logits, seen)
    np.testing.assert_allclose(penalised, [[1.0, -2.0, 1.0, 2.0 - 0.5 - 0.5]])
