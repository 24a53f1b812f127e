"""A second process finds the executables of a Generator and of a chat untraced."""

import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.models import generate
from jaxkern.models.conversation import Conversation
from jaxkern.models.generate import Generator
from jaxkern.models.loader import load_file
from jaxkern.models.sampling import Sampling
from jaxkern.runtime import enable_compilation_cache
from jaxkern.runtime.plan import kept_calls, surroundings
from jaxkern.runtime.plan.kept_calls import KeptCalls
from jaxkern.runtime.trace.events import subscribe
from tests.models import tiny_gguf

STEPS = "read_prompts", "write_chunk"
CHAT = "empty_state", "read_more", "write_chunk"
PROMPT = [[5, 77, 200]]
SIZES: dict[str, Any] = dict(batch=1, prompt_slots=4, max_tokens=9, chunk=4)


def start(path: str, folder: str) -> dict[str, dict]:
    """What a start of a Generator and one of a chat write, trace, compile and find."""
    enable_compilation_cache(folder)
    model = load_file(read_gguf(path), "f32")
    return {"generator": watched(generated, model), "chat": watched(chatted, model)}


def watched(write: Callable[..., list], model: tuple) -> dict:
    traced, told = [], []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    with subscribe(told.append, kinds=("compile", "cache_hit")):
        tokens = write(*model)
    jax.monitoring.unregister_event_duration_listener(listen)
    return {
        "traced": [name for name in traced if name in (*STEPS, *CHAT)],
        "told": sorted(f"{event.kind} {event.name}" for event in told),
        "tokens": tokens,
    }


def generated(config: Any, weights: Any) -> list:
    stream = Generator(config, weights, **SIZES).stream(PROMPT)
    return [chunk.tolist() for chunk in stream]


def chatted(config: Any, weights: Any) -> list:
    chat = Conversation(config, weights, slots=16)
    return [*chat.answer(PROMPT[0], max_tokens=5)]


def found(model, monkeypatch, **sizes) -> list[bool]:
    """Whether each executable of a Generator of other sizes is there.

    Where the first is not, the process that compiles kernels begins, then it is traced.
    """
    files, order = [], []

    def look(calls, kept, ask):
        assert ask == (None if kept.find(*calls["prefill"]) else order.append)
        files.extend(kept.find(*call) is not None for call in calls.values())
        return {}

    def shapes(kept, *call):
        order.append("traced")
        assert not gc.isenabled()  # collections would walk all of jax
        return KeptCalls.shapes(kept, *call)

    def begin():
        order.append("begun")
        return contextlib.nullcontext(order.append)

    with monkeypatch.context() as patched:
        patched.setattr(generate, "compiled_in_turn", look)
        patched.setattr(generate, "compiled_ahead", begin)
        patched.setattr(
            generate, "KeptCalls", type("", (KeptCalls,), {"shapes": shapes})
        )
        Generator(*model, **SIZES | sizes)
    assert order == ["begun", "traced"][files[0] :]
    return files


@pytest.mark.smoke
def test_a_second_process_traces_nothing_and_writes_the_same(
    tmp_path, monkeypatch, compilation_cache_as_it_was
):
    monkeypatch.setattr(surroundings, "check_rows", lambda: None)  # of other tests
    monkeypatch.setattr(surroundings, "IMPORTED", float("inf"))  # long ago, here
    surroundings.digest_of_sources.cache_clear()
    monkeypatch.setattr(tiny_gguf, "LAYERS", 1)
    path = str(tiny_gguf.write_tiny_gguf(tmp_path / "m.gguf", "llama"))
    folder = str(tmp_path / "cache")
    first = start(path, folder)
    calls = {"generator": STEPS, "chat": CHAT}
    for what, names in calls.items():
        assert {*first[what]["traced"]} == {*names}
        assert first[what]["told"] == [f"compile jit({name})" for name in names]
    kept_calls.writer.submit(int).result()
    run = subprocess.run(
        [sys.executable, __file__, path, folder], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    second = json.loads(run.stdout)
    for what, names in calls.items():
        assert second[what]["traced"] == []
        assert second[what]["told"] == [f"cache_hit jit({name})" for name in names]
        assert second[what]["tokens"] == first[what]["tokens"]
    model = load_file(read_gguf(path), "f32")
    assert found(model, monkeypatch) == [True, True]
    assert found(model, monkeypatch, chunk=8) == [True, False]
    for sizes in (
        {"prompt_slots": 8},
        {"batch": 2},
        {"cache": "int8"},
        {"sampling": Sampling(temperature=0.5)},
    ):
        assert found(model, monkeypatch, **sizes) == [False, False], sizes
    config, weights = model
    other = dataclasses.replace(config, eps=1e-3)
    assert found((other, weights), monkeypatch) == [False, False]


@pytest.mark.parametrize("is_read_to_the_end", [True, False])
def test_calls_are_written_behind_the_first_token(
    tmp_path, monkeypatch, compilation_cache_as_it_was, is_read_to_the_end
):
    """Of an answer that nobody reads on, when its generator goes."""
    monkeypatch.setattr(surroundings, "check_rows", lambda: None)
    monkeypatch.setattr(surroundings, "IMPORTED", float("inf"))
    surroundings.digest_of_sources.cache_clear()
    monkeypatch.setattr(tiny_gguf, "LAYERS", 1)
    enable_compilation_cache(tmp_path)
    path = tiny_gguf.write_tiny_gguf(tmp_path / "m.gguf", "llama")
    generator = Generator(
        *load_file(read_gguf(path), "f32"), **SIZES | {"max_tokens": 1}
    )
    stream = generator.stream(PROMPT)
    next(stream)
    kept_calls.writer.submit(int).result()
    assert not [*(tmp_path / kept_calls.FOLDER).iterdir()]
    if is_read_to_the_end:
        assert not [*stream]
    else:
        del generator, stream
    kept_calls.writer.submit(int).result()
    assert len([*(tmp_path / kept_calls.FOLDER).iterdir()]) == 1


if __name__ == "__main__":
    print(json.dumps(start(*sys.argv[1:])))
