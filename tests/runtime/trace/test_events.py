"""events: what happens is told once, to whoever asked; a cache on disk is found."""

import os
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring

from jaxkern.runtime import enable_compilation_cache, reset_stats, stats, upload
from jaxkern.runtime.trace import events
from jaxkern.runtime.trace.events import Event, subscribe

pytestmark = pytest.mark.smoke


@pytest.fixture
def cache_directory(tmp_path, compilation_cache_as_it_was):
    return enable_compilation_cache(tmp_path / "new" / "cache")


def test_compilations_and_cache_hits_are_told_apart(cache_directory):
    def program(x):
        return jnp.sin(x) * 3.5

    told, x = [], jnp.ones(5)
    with subscribe(told.append, kinds=("compile", "cache_hit")):
        for _ in range(2):
            jax.jit(lambda x: program(x))(x)  # another function, the same program
        jax.jit(lambda x: program(x) + 1)(x)
    assert [e.kind for e in told] == ["compile", "cache_hit", "compile"]
    assert all(e.name == "jit(<lambda>)" and e.seconds > 0 for e in told)
    assert len(list(cache_directory.glob("jit__lambda*-cache"))) == 2


def test_the_cache_directory_must_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        enable_compilation_cache(tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_a_cache_that_others_can_write_is_refused(tmp_path):
    """Executables there are run. The tests before this one had folders of their own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(ValueError, match=r"^enable_compilation_cache: others can"):
        enable_compilation_cache(folder)
    folder.chmod(0o755)
    (folder / "planted").write_bytes(b"")
    (folder / "planted").chmod(0o666)
    with pytest.raises(ValueError, match=r"planted, and would be run\. Remove it"):
        enable_compilation_cache(folder)
    assert jax.config.jax_compilation_cache_dir == before


def test_nothing_listens_before_the_first_nor_after_the_last(monkeypatch):
    calls = []
    for name in (
        "register_event_listener",
        "register_event_duration_secs_listener",
        "unregister_event_listener",
        "unregister_event_duration_listener",
    ):
        monkeypatch.setattr(monitoring, name, lambda _, name=name: calls.append(name))
    first, second = subscribe(print), subscribe(print)
    assert [c.split("_")[0] for c in calls] == ["register"] * 2
    first.close()
    first.close()
    assert len(calls) == 2
    second.close()
    assert [c.split("_")[0] for c in calls[2:]] == ["unregister"] * 2


def test_listeners_that_another_has_cleared_are_no_error():
    with subscribe(print):
        monitoring.unregister_event_listener(events._on_event)
        monitoring.unregister_event_duration_listener(events._on_duration)


def test_a_subscriber_that_raises_disturbs_nobody():
    told = []

    def bad(event):
        raise KeyError(event.kind)

    with subscribe(bad), subscribe(told.append):
        with pytest.warns(UserWarning, match="a subscriber raised KeyError"):
            jax.jit(lambda x: x * 5.25)(1.0)
    assert {e.kind for e in told} == {"compile"}


def test_counts_under_threads_and_reset():
    reset_stats()
    x = {"w": jnp.ones((2, 2))}

    def work():
        for _ in range(10):
            upload(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    now = stats()
    assert (now.uploads, now.uploaded_bytes) == (40, 0)
    assert now.oom_fallbacks == {} == now.budget_refusals
    with pytest.raises(TypeError):
        now.oom_fallbacks["f", "r"] = 1  # pyright: ignore
    reset_stats()
    assert stats().uploads == 0 and now.uploads == 40


def test_a_subscriber_may_close_itself_and_kinds_are_checked():
    told = []

    def once(event):
        told.append(event)
        handle.close()

    handle = subscribe(once, kinds=("upload",))
    upload({"a": 1.0})
    upload({"a": 1.0})
    assert [e.kind for e in told] == ["upload"] and told[0].bytes == 4
    assert Event("upload", "upload", told[0].seconds, 4) == told[0]
    with pytest.raises(ValueError, match=r"kinds.*\['load'\]"):
        subscribe(print, kinds=("load",))
