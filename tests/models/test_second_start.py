"""A second process finds both executables of a Generator without tracing them."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.models import generate
from jaxkern.models.generate import Generator
from jaxkern.models.loader import load_file
from jaxkern.models.sampling import Sampling
from jaxkern.runtime import enable_compilation_cache
from jaxkern.runtime.plan import kept_calls, surroundings
from jaxkern.runtime.trace.events import subscribe
from tests.models import tiny_gguf

STEPS = "read_prompts", "write_chunk"
PROMPT = [[5, 77, 200]]
SIZES: dict[str, Any] = dict(batch=1, prompt_slots=4, max_tokens=9, chunk=4)


def start(path: str, folder: str) -> dict:
    """Tokens of a start, and what was traced, compiled and found for it."""
    enable_compilation_cache(folder)
    config, weights = load_file(read_gguf(path), "f32")
    traced, told = [], []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    with subscribe(told.append, kinds=("compile", "cache_hit")):
        generator = Generator(config, weights, **SIZES)
    jax.monitoring.unregister_event_duration_listener(listen)
    return {
        "traced": [name for name in traced if name in STEPS],
        "told": sorted(f"{event.kind} {event.name}" for event in told),
        "tokens": [chunk.tolist() for chunk in generator.stream(PROMPT)],
    }


def both(kind: str) -> list[str]:
    return [f"{kind} jit({name})" for name in STEPS]


def found(model, monkeypatch, **sizes) -> list[bool]:
    """Whether each executable of a Generator of other sizes is there."""
    files = []

    def look(calls, kept):
        files.extend(kept.find(*call) is not None for call in calls.values())
        return {}

    with monkeypatch.context() as patched:
        patched.setattr(generate, "compiled_in_turn", look)
        Generator(*model, **SIZES | sizes)
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
    assert {*first["traced"]} == {*STEPS}
    assert first["told"] == [f"compile jit({name})" for name in STEPS]
    kept_calls.writer.submit(int).result()
    run = subprocess.run(
        [sys.executable, __file__, path, folder], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    second = json.loads(run.stdout)
    assert second["traced"] == []
    assert second["told"] == [f"cache_hit jit({name})" for name in STEPS]
    assert second["tokens"] == first["tokens"]
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


if __name__ == "__main__":
    print(json.dumps(start(*sys.argv[1:])))
