"""The cache: one executable per program, the first insert wins, all fields in view."""

import json
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.runtime.plan import kernel_cache
from jaxkern.runtime.plan.kernel_cache import HIT, KernelCache

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)
W = jnp.eye(16) * 2


def model(weights, x, unused, y):
    return {"y": jnp.tanh(x @ weights["w"])}, x + 1


ARGS = ({"w": W}, X, 1.0, X)


@pytest.fixture(scope="module")
def kernel():
    return KernelCache().get_or_compile(model, *ARGS, donate=1)


@pytest.mark.smoke
def test_fields(kernel):
    assert kernel.device == "cpu:0"
    assert kernel.entry_point.startswith("main")
    # flat: w, x, unused, y, then the results y and x + 1
    assert kernel.globals == (0, 1, 2, 3, 4, 5)
    assert kernel.ins == (0, 1)
    ((result, argument),) = kernel.aliases.items()
    assert argument == 1 and result in (4, 5), "x is donated"
    assert kernel.outs == (1, 4, 5)
    assert kernel.host_parallel_safe
    assert kernel.variables == {}
    assert kernel.global_size is None and kernel.local_size is None
    assert kernel.cost["flops"] >= 2 * 4 * 16 * 16
    assert len(kernel.program) > 0 and not kernel.from_disk
    y, x1 = kernel({"w": W}, X + 0, 1.0, X)
    np.testing.assert_allclose(y["y"], np.tanh(2 * X), rtol=1e-6)
    np.testing.assert_array_equal(x1, X + 1)


@pytest.mark.smoke
def test_source_at_every_level(kernel):
    assert "dot_general" in kernel.source("jaxpr")
    assert "stablehlo.dot_general" in kernel.source("stablehlo")
    assert f"ENTRY %{kernel.entry_point}" in kernel.source("hlo")
    for level in ("ptx", "ttir"):
        with pytest.raises(ValueError, match=f"has no {level}: no Triton kernel"):
            kernel.source(level)
    with pytest.raises(ValueError, match="got 'sass'"):
        kernel.source("sass")


@pytest.mark.smoke
def test_equal_programs_share_and_others_do_not():
    cache = KernelCache()
    first = cache.get_or_compile(jnp.sin, X)
    spec = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    assert cache.get_or_compile(jnp.sin, spec) is first
    there = jax.device_put(X, jax.devices()[-1])
    assert cache.get_or_compile(jnp.sin, there).device == f"cpu:{there.device.id}"
    others = [
        cache.get_or_compile(jnp.sin, X[:2]),
        cache.get_or_compile(jnp.sin, X.astype(jnp.bfloat16)),
        cache.get_or_compile(jnp.sin, X, donate=0),
        cache.get_or_compile(
            jnp.sin, X, compiler_options={"xla_cpu_enable_fast_math": True}
        ),
    ]
    assert len({k.key for k in (first, *others)}) == 5
    nested = [cache.get_or_compile(lambda x: x, tree) for tree in (X, (X,), [X])]
    assert len({k.key for k in nested}) == 3, "the same StableHLO, called otherwise"
    assert len(first.key) == 64


def test_callbacks_are_told_apart():
    x, cache = jnp.ones(2), KernelCache()

    def on_host(f):
        return lambda x: jax.pure_callback(f, jax.typeof(x), x)

    sin, cos = on_host(np.sin), on_host(np.cos)
    for f, y in ((sin, np.sin(x)), (cos, np.cos(x)), (sin, np.sin(x))):
        np.testing.assert_allclose(cache.get_or_compile(f, x)(x), y, rtol=1e-6)
    assert (cache.stats().hits, cache.stats().misses) == (1, 2)


def test_flags_of_xla_are_part_of_the_key(monkeypatch):
    cache, flags = KernelCache(), os.environ.get("XLA_FLAGS", "")
    cache.get_or_compile(jnp.sin, X)
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
    cache.get_or_compile(jnp.sin, X)
    assert cache.stats().misses == 2


def test_a_folder_that_takes_nothing_is_counted(tmp_path):
    folder = tmp_path / "cache"
    cache = KernelCache(folder)
    folder.rmdir()
    kernel = cache.get_or_compile(jnp.sin, X)
    np.testing.assert_allclose(kernel(X), np.sin(X), rtol=1e-5)
    assert (cache.stats().misses, cache.stats().unwritten) == (1, 1)


def test_effects_are_not_safe_in_parallel():
    def f(x):
        jax.debug.callback(lambda v: None, x)
        return x

    assert not KernelCache().get_or_compile(f, X).host_parallel_safe


def test_open_sizes_are_its_variables():
    spec = jax.ShapeDtypeStruct(("n", 16), jnp.float32)
    cache = KernelCache()
    kernel = cache.get_or_compile(jnp.sin, spec, bounds={"n": (1, 64)}, sizes={"n": 4})
    assert kernel.variables == {"n": (1, 64)}
    np.testing.assert_allclose(kernel(X), np.sin(X), rtol=1e-6)
    with pytest.raises(ValueError, match="n is 65"):
        cache.get_or_compile(jnp.sin, spec, bounds={"n": (1, 64)}, sizes={"n": 65})


def in_threads(n, work):
    start = threading.Barrier(n)

    def run(i):
        start.wait()
        work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.smoke
def test_the_first_insert_wins_under_threads():
    cache, found = KernelCache(), []
    in_threads(4, lambda i: found.append(cache.get_or_compile(jnp.cos, X)))
    assert len(found) == 4 and len({id(k) for k in found}) == 1
    stats = cache.stats()
    assert stats.hits + stats.misses == 4
    assert stats.misses - stats.dropped == 1 == len(cache.entries())
    assert stats.compile_seconds > 0


def test_stats_reach_the_listeners_of_jax():
    cache, events = KernelCache(), []

    def listen(name, **_):
        events.append(name)

    jax.monitoring.register_event_listener(listen)
    try:
        cache.get_or_compile(jnp.sin, X)
        cache.get_or_compile(jnp.sin, X)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert events.count(HIT) == cache.stats().hits == 1
    cache.clear()
    assert cache.entries() == () and cache.stats().misses == 1


@pytest.mark.smoke
def test_a_folder_keeps_the_machine_code(tmp_path):
    folder = tmp_path / "cache"
    made = KernelCache(folder).get_or_compile(model, *ARGS, donate=1)
    assert [f.name for f in folder.iterdir()] == [f"{made.key}.kernel"]
    cache = KernelCache(folder)
    kernel = cache.get_or_compile(model, *ARGS, donate=1)
    assert kernel.from_disk and kernel.key == made.key
    assert (cache.stats().hits, cache.stats().misses) == (1, 0)
    y, _ = kernel({"w": W}, X + 0, 1.0, X)
    np.testing.assert_allclose(y["y"], np.tanh(2 * X), rtol=1e-6)
    assert kernel.aliases == made.aliases
    assert kernel.source("stablehlo") == made.source("stablehlo")


def test_a_damaged_file_is_counted_and_written_anew(tmp_path):
    made = KernelCache(tmp_path / "c").get_or_compile(jnp.sin, X)
    file = tmp_path / "c" / f"{made.key}.kernel"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        cache = KernelCache(tmp_path / "c")
        np.testing.assert_allclose(
            cache.get_or_compile(jnp.sin, X)(X), np.sin(X), rtol=1e-6
        )
        assert (cache.stats().unreadable, cache.stats().misses) == (1, 1)
        assert KernelCache(tmp_path / "c").get_or_compile(jnp.sin, X).from_disk


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_a_folder_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ValueError, match=r"others can write to .*chmod go-w"):
        KernelCache(tmp_path / "shared")
    made = tmp_path / "new" / "deep"
    KernelCache(made)
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_a_folder_that_others_can_replace_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match=r"in the place of .*chmod o-w .*open"):
        KernelCache(tmp_path / "open" / "cache")
    (tmp_path / "open").chmod(0o1777)  # as /tmp
    KernelCache(tmp_path / "open" / "cache")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
@pytest.mark.parametrize("way", ["writable", "link", "of another user"])
def test_a_file_that_another_user_could_have_written_is_not_run(tmp_path, way):
    """The test of folders alone could not see it: the folder is this user's."""
    folder = tmp_path / "c"
    made = KernelCache(folder).get_or_compile(jnp.sin, X)
    file = folder / f"{made.key}.kernel"
    folder.chmod(0o755)
    if way == "writable":
        file.chmod(0o666)
    elif way == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif os.getuid() != 0:
        pytest.skip("only root can give a file away")
    else:
        os.chown(file, 12345, -1)
    cache = KernelCache(folder)
    assert not cache.get_or_compile(jnp.sin, X).from_disk
    assert (cache.stats().unreadable, cache.stats().misses) == (1, 1)
    assert KernelCache(folder).get_or_compile(jnp.sin, X).from_disk, "written anew"


def test_the_cache_of_the_process():
    kernel_cache.clear()
    before = kernel_cache.stats()
    kernel = kernel_cache.get_or_compile(jnp.arctan, X)
    assert kernel_cache.get_or_compile(jnp.arctan, X) is kernel
    assert kernel_cache.entries() == (kernel,)
    assert kernel_cache.stats().hits == before.hits + 1
    assert json.dumps(kernel.cost)
