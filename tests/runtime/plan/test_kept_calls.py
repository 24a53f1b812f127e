"""Calls that are found before they are traced: which are the same, which are not."""

import contextlib
import functools
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern import runtime
from jaxkern.gpu.device import compiling_for
from jaxkern.runtime.plan import fingerprint, kept_calls, surroundings
from jaxkern.runtime.plan.fingerprint import NotUnderstoodError, described
from jaxkern.runtime.plan.kept_calls import KeptCalls
from tests.runtime.plan.kept import X, capped, file_of, start

pytestmark = pytest.mark.smoke
VERSIONS = surroundings.versions()


def test_the_second_start_traces_nothing(kept_folder):
    first, y = start()
    assert first == ["compile jit(softcap)"]
    [file] = kept_folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600

    function = capped()
    function.trace = lambda *_: pytest.fail("it was traced")
    second, again = start(function)
    assert second == ["cache_hit jit(softcap)"]
    np.testing.assert_array_equal(again, y)
    kept = KeptCalls()
    shapes = kept.shapes(function, (X,))
    assert (shapes.shape, shapes.dtype) == (X.shape, X.dtype)


def test_a_call_with_a_random_key_is_kept_too(kept_folder):
    sampler = functools.partial(jaxkern.sample, temperature=1.0)
    keys = [jax.random.key(3), jax.random.key(3, impl="rbg"), jax.random.PRNGKey(3)]
    several = jax.random.split(keys[0], 1)
    files = {file_of(jax.jit(sampler), (X, key)) for key in (*keys, several)}
    assert None not in files and len(files) == 4

    first, token = start(jax.jit(sampler), (X, keys[0]))
    second, again = start(jax.jit(sampler), (X, keys[0]))
    assert [*map(len, (first, second))] == [1, 1] and len(
        list(kept_folder.iterdir())
    ) == 1
    assert second[0].startswith("cache_hit") and token == again

    split = [start(jax.jit(jax.random.split), (keys[0],)) for _ in range(2)]
    assert [told[0].split()[0] for told, _ in split] == ["compile", "cache_hit"]
    assert (
        jax.random.key_data(split[0][1]).tolist()
        == jax.random.key_data(split[1][1]).tolist()
    )


def test_a_call_of_numpy_arrays_is_kept_too(kept_folder):
    for x in (np.asarray(X), np.float32(1.5)):
        first, y = start(arguments=(x,))
        second, again = start(arguments=(x + 1,))  # other numbers of that shape
        assert first == ["compile jit(softcap)"]
        assert second == ["cache_hit jit(softcap)"]
        np.testing.assert_array_equal(y, jaxkern.softcap(x, 2.0))
        np.testing.assert_array_equal(again, jaxkern.softcap(x + 1, 2.0))
    assert len(list(kept_folder.iterdir())) == 2


def test_a_call_that_cannot_be_described_is_compiled(kept_folder, caplog, monkeypatch):
    def fail(_):
        raise AttributeError("of an operand")

    monkeypatch.setattr(kept_calls, "described_operands", fail)
    told, y = start()
    assert told == ["compile jit(softcap)"] and y.shape == X.shape
    assert "keeps no traced call" in caplog.text and not list(kept_folder.iterdir())


def changed_environment(name, value):
    return pytest.MonkeyPatch.context, lambda m: m.setenv(name, value)


def changed(name, value):
    return pytest.MonkeyPatch.context, lambda m: m.setattr(surroundings, name, value)


OTHERS = {
    "jax": changed("versions", lambda: VERSIONS | {"jax": "0.13"}),
    "jaxlib": changed("versions", lambda: VERSIONS | {"jaxlib": "0.13"}),
    "sources": changed("digest_of_sources", lambda: "0" * 64),
    "device": changed("machine", lambda _: {"device kind": "NVIDIA H200"}),
    "multiprocessors": changed("num_sms", lambda: 66),
    "driver": changed("driver_version", lambda: 12_080),
    "threads": changed("num_threads", lambda: 99),
    "library": changed("libraries", lambda: ["avx2", None, None]),
    "flags": changed_environment("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "flags of Triton": changed_environment("TRITON_DISABLE_LINE_INFO", "1"),
    "flags of jax": changed_environment("JAX_USE_MAGMA", "off"),
    "TF32": changed_environment("NVIDIA_TF32_OVERRIDE", "0"),
}
BLOCKS = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "64 bits": lambda: jax.enable_x64(True),
    "backend": lambda: jaxkern.backend("xla"),
    "policy": lambda: runtime.policy("bf16"),
    "another GPU": lambda: compiling_for(90),
}


def test_another_machine_version_or_setting_is_another_call(kept_folder):
    files = {file_of()}
    for make, change in OTHERS.values():
        with make() as patched:
            change(patched)
            files.add(file_of())
    for block in BLOCKS.values():
        with block():
            files.add(file_of())
    assert None not in files and len(files) == 1 + len(OTHERS) + len(BLOCKS)
    places = "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "HOME"
    with pytest.MonkeyPatch.context() as patched:
        for name in places:
            patched.setenv(name, "1")
        assert file_of() in files, "what names a place changes no code"
    with pytest.MonkeyPatch.context() as patched:
        first = jax.devices()[:1]
        patched.setattr(jax, "devices", lambda: first)
        assert file_of() not in files


def test_another_function_or_other_operands_are_another_call(kept_folder):
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    calls = [
        (capped(), (X,)),
        (capped(3.0), (X,)),
        (capped(2), (X,)),
        (capped(donate_argnums=0), (X,)),
        (capped(compiler_options={"xla_cpu_enable_fast_math": True}), (X,)),
        (jax.jit(functools.partial(jaxkern.softmax)), (X,)),
        (capped(), (X[:4],)),
        (capped(), (X[None],)),
        (capped(), (X.astype(jnp.bfloat16),)),
        (capped(), (shape,)),
        (capped(), (shape.update(weak_type=True),)),
        (capped(), (jax.device_put(X, jax.devices()[0]),)),
        (capped(), ({"x": X},)),
        (capped(), ((X,),)),
        (capped(), ([X],)),
        (capped(), (np.ones(8, np.float32),)),
        (capped(), (np.ones(8, np.float16),)),
        (capped(), (np.ones(4, np.float32),)),
        (capped(), (np.float32(1),)),
    ]
    files = {file_of(*call) for call in calls}
    assert None not in files and len(files) == len(calls)
    assert {file_of(*call) for call in calls} == files
    # numpy's 64 bits are 32 to jax, and its numbers are free
    assert file_of(capped(), (np.zeros(8),)) in files
    assert file_of(capped(), (np.float64(2),)) in files


class Foreign(float):
    pass


def refused(caplog, reason, *call):
    caplog.clear()
    assert file_of(*call) is None
    assert reason in caplog.text


def test_what_is_not_understood_is_not_kept(kept_folder, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "jaxkern")
    refused(caplog, "<lambda>", jax.jit(lambda x: x))
    refused(caplog, "not jitted", functools.partial(jaxkern.softcap, cap=1.0))
    refused(caplog, "Foreign is not understood", capped(Foreign(1)))
    refused(caplog, "operand that is a float", capped(), (1.0,))
    refused(caplog, "numpy array of object", capped(), (np.array([None]),))
    there = jax.device_put(X, jax.devices()[-1])
    refused(caplog, "another device", capped(), (there,))
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        refused(caplog, "a mesh is in force")
    with jax.default_device(jax.devices()[-1]):
        refused(caplog, "not the first device")
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "flags.txt")
        refused(caplog, "XLA_FLAGS=flags.txt, the name of a file")
    with monkeypatch.context() as patched:
        patched.setattr(surroundings, "IMPORTED", 0.0)
        refused(caplog, "changed since it was imported")
    with monkeypatch.context() as patched:
        patched.setattr(surroundings, "sources", lambda: [("here", "here/gone.py")])
        refused(caplog, "No such file or directory: 'here/gone.py'")
    assert start(jax.jit(lambda x: x + 1))[0] == ["compile jit(<lambda>)"]
    assert not list(kept_folder.iterdir())


def test_a_kernel_of_another_package_is_not_understood(monkeypatch):
    class Op:
        name, rows = "op", {"cpu": [type("Row", (), {"kernel": start})]}

    monkeypatch.setattr(surroundings, "every_op", lambda: {"op": Op})
    with pytest.raises(NotUnderstoodError, match=r"a kernel of op from tests\.runtime"):
        surroundings.check_rows()


def test_values_are_written_so_that_different_ones_differ():
    values = [
        *(None, True, 1, 1.0, "1", b"1", (1,), [1], {"a": 1}, {1}, frozenset({1})),
        *(jnp.float32, np.dtype("float32"), np.float32(1), np.ones(1), np.ones((1, 1))),
        *(0.1 + 0.2, 0.3, float("nan"), ("1", "2"), ("1, '2'",), jaxkern.rms_norm),
        *(functools.partial(jaxkern.softcap, cap=1), jax.lax.Precision.HIGH),
        *(surroundings.backend_context.value, jax.lax.Precision.HIGHEST),
    ]
    assert len({*map(described, values)}) == len(values)
    assert described({"b", "a"}) == described({"a", "b"})
    for value in (1j, object(), start, fingerprint, np.array([start]), X):
        with pytest.raises(NotUnderstoodError):
            described(value)


def test_what_jax_has_kept_or_made_quickly_is_not_kept(kept_folder):
    assert start()[0] == ["compile jit(softcap)"]
    [file] = kept_folder.iterdir()
    file.unlink()
    assert start()[0] == ["cache_hit jit(softcap)"]  # jax's own, lowered again
    assert not list(kept_folder.iterdir())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e3)
    start(capped(5.0))
    assert not list(kept_folder.iterdir())


def test_on_a_gpu_jax_does_not_write_what_is_kept(kept_folder, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert start()[0] == ["compile jit(softcap)"]
    assert [*kept_folder.parent.iterdir()] == [kept_folder]
    assert len([*kept_folder.iterdir()]) == 1
    assert start()[0] == ["cache_hit jit(softcap)"]
    # what is not understood is jax's as before
    assert start(jax.jit(lambda x: x + 3))[0] == ["compile jit(<lambda>)"]
    assert len([*kept_folder.parent.iterdir()]) > 1 == len([*kept_folder.iterdir()])


def test_starts_beside_each_other_leave_the_setting_as_it_was(kept_folder):
    name, writes = "jax_persistent_cache_min_compile_time_secs", kept_calls.jax_writes
    jax.config.update(name, 0.5)
    first, second = writes.stopped(), writes.stopped()
    first.__enter__()
    second.__enter__()
    assert getattr(jax.config, name) == np.inf and writes.least_seconds() == 0.5
    first.__exit__(None, None, None)
    assert getattr(jax.config, name) == np.inf and writes.least_seconds() == 0.5
    second.__exit__(None, None, None)
    assert getattr(jax.config, name) == writes.least_seconds() == 0.5
    with pytest.raises(ValueError, match="no"), writes.stopped():
        raise ValueError("no")
    assert getattr(jax.config, name) == 0.5


def test_sources_that_change_while_it_compiles_are_not_kept(kept_folder, monkeypatch):
    def change():
        raise NotUnderstoodError("a file, changed since it was imported,")

    monkeypatch.setattr(kept_calls, "check_unchanged", change)
    start()
    assert not list(kept_folder.iterdir())


def test_where_calls_are_kept(kept_folder, caplog, tmp_path):
    assert kept_calls.folder() == kept_folder
    with contextlib.ExitStack() as undone:
        undone.callback(jax.config.update, "jax_enable_compilation_cache", True)
        jax.config.update("jax_enable_compilation_cache", False)
        assert kept_calls.folder() is None
    for nowhere in (None, "", "gs://bucket/cache"):
        jax.config.update("jax_compilation_cache_dir", nowhere)
        assert kept_calls.folder() is None
    assert not caplog.text
    if hasattr(os, "getuid"):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        kept_folder.chmod(0o777)
        assert kept_calls.folder() is None
        assert "others can write" in caplog.text and "chmod go-w" in caplog.text
