"""Plans in files: the same results, and no file that can do harm or fail obscurely."""

import functools
import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, rms_norm, runtime, softmax
from jaxkern.cpu.cpu_call import missing
from jaxkern.lowering.machine import machine, versions
from jaxkern.runtime.plan import kernel_cache, saved_plan
from jaxkern.runtime.plan.saved_plan import MAGIC

pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)
WEIGHTS = {"norm": jnp.linspace(0.5, 1.5, 16), "out": jnp.eye(16) * 2}


def model(weights, x):
    return {"y": jnp.tanh(rms_norm(x, weights["norm"]) @ weights["out"])}, x + 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "model.plan"
    runtime.compile(model, WEIGHTS, X, donate=1).save(path)
    return path


@pytest.mark.smoke
@pytest.mark.parametrize("machine_code", [False, True])
def test_a_loaded_plan_computes_the_same(saved, machine_code):
    plan = runtime.load(saved, trusted=machine_code, machine_code=machine_code)
    expected = runtime.compile(model, WEIGHTS, X)(WEIGHTS, X)
    x = X + 0
    out = plan(WEIGHTS, x)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (out, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert x.is_deleted(), "donation is part of the plan"
    assert len(plan) > 0 and plan.memory().arguments > 0
    if machine_code:
        with pytest.raises(ValueError, match="does not keep its stablehlo"):
            plan.source("stablehlo")
        with pytest.raises(ValueError, match="machine code alone"):
            plan.save(saved.with_suffix(".again"))
        assert sum(plan.report().equations.values()) == 0


def test_an_executable_that_was_read_from_disk_is_compiled_anew_to_be_saved(
    tmp_path, compilation_cache_as_it_was
):
    """XLA for CPUs writes one that it has read without its functions."""
    runtime.enable_compilation_cache(tmp_path / "jax")
    x = np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)
    plans = [runtime.compile(lambda x: jnp.sin(x) @ x + x.sum(), x) for _ in range(2)]
    assert [plan.was_read for plan in plans] == [False, True]
    again = runtime.compile(plans[1].stage.function, x)  # jax has it in memory
    assert again.was_read
    for plan in (plans[1], again):
        plan.save(tmp_path / "read.plan")
        loaded = runtime.load(tmp_path / "read.plan", trusted=True, machine_code=True)
        np.testing.assert_array_equal(loaded(x), plans[0](x))
    for folder in (tmp_path / "kernels",) * 2:
        kernel = kernel_cache.KernelCache(folder).get_or_compile(jnp.cumsum, x)
        np.testing.assert_allclose(kernel(x), np.cumsum(x), rtol=1e-6)
    assert kernel.from_disk


def test_what_was_traced_is_saved_not_what_the_function_does_now(tmp_path):
    """A function can depend on contexts, which end."""
    factor = 2.0
    plan = runtime.compile(lambda x: x * factor, X)
    factor = 3.0
    plan.save(tmp_path / "twice.plan")
    np.testing.assert_array_equal(runtime.load(tmp_path / "twice.plan")(X), X * 2)


def test_machine_code_needs_trust(saved):
    with pytest.raises(ValueError, match="machine code can do anything"):
        runtime.load(saved, machine_code=True)


def change_header(path, target, **changes):
    """The file with another header."""
    data = path.read_bytes()
    start = len(MAGIC) + 8
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    header = json.loads(data[start : start + length]) | changes
    text = json.dumps(header).encode()
    rest = data[start + length :]
    target.write_bytes(MAGIC + len(text).to_bytes(8, "little") + text + rest)
    return target


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"machine": {"platform": "gpu"}}, "platform is gpu, here it is cpu"),
        ({"made_by": {"jaxlib": "0.1"}}, "made by jaxlib 0.1, here is"),
        ({"why_no_machine_code": "no reason"}, "the file has none: no reason"),
    ],
)
def test_machine_code_for_elsewhere_is_refused(saved, tmp_path, changes, message):
    path = change_header(saved, tmp_path / "other.plan", **changes)
    with pytest.raises(ValueError, match=message):
        runtime.load(path, trusted=True, machine_code=True)
    runtime.load(path)  # its StableHLO runs everywhere


@pytest.mark.smoke
def test_truncated_and_foreign_files_are_refused(saved, tmp_path):
    data, path = saved.read_bytes(), tmp_path / "broken.plan"
    for size in (0, 5, len(MAGIC), len(MAGIC) + 8, len(MAGIC) + 30, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"load: .*broken\.plan is"):
            runtime.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(ValueError, match="truncated or damaged"):
        runtime.load(path)
    path.write_bytes(MAGIC.replace(b"1", b"2") + data[len(MAGIC) :])
    with pytest.raises(ValueError, match="a plan of another format"):
        runtime.load(path)
    path.write_bytes(MAGIC + (1 << 62).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="its header"):
        runtime.load(path)
    flipped = bytearray(data)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match="the checksum of its machine_code"):
        runtime.load(path)
    with pytest.raises(FileNotFoundError):
        runtime.load(tmp_path / "none.plan")


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b"{}", b"null", b'{"sizes": 3}', b"\xff", b"[" * 10**5),
        b'{"sizes": {"stablehlo": 1e999}}',
        b'{"sizes": {"stablehlo": 0, "machine_code": 0}, "machine": [], "donate": [],'
        b' "sha256": {"stablehlo": 0, "machine_code": 0}, "options": {}, "made_by": 1}',
    ],
    ids=range(8),
)
def test_any_json_in_the_header_is_refused_in_words(tmp_path, header):
    path = tmp_path / "odd.plan"
    path.write_bytes(MAGIC + len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"load: .* is damaged: its header"):
        runtime.load(path)


class Bomb:
    """Unpickling it leaves a mark."""

    def __reduce__(self):
        return exec, ("import builtins; builtins.exploded = True",)


def write(path, stablehlo, machine_code, **changes):
    header = {
        "made_by": versions(),
        "machine": machine(jax.devices()[0]),
        "donate": [],
        "options": {},
    }
    parts = {"stablehlo": stablehlo, "machine_code": machine_code}
    saved_plan.write_parts(path, header | changes, parts)


def test_a_pickle_in_the_file_does_not_run(saved, tmp_path):
    """In either part; with right checksums, which anyone can write."""
    import builtins

    bomb, path = pickle.dumps(Bomb()), tmp_path / "bomb.plan"
    _, parts = saved_plan.read_parts(saved)
    write(path, parts["stablehlo"], bomb)
    runtime.load(path)(WEIGHTS, X)
    write(path, bomb, bomb)
    with pytest.raises(ValueError, match="cannot read the StableHLO"):
        runtime.load(path)
    assert not hasattr(builtins, "exploded")


def test_half_a_program_below_right_checksums_is_refused(tmp_path):
    """Or, where only padding is cut off, it is the program."""
    path = tmp_path / "half.plan"
    runtime.compile(jnp.tanh, X).save(path)
    _, parts = saved_plan.read_parts(path)
    data, refused = parts["stablehlo"], 0
    for size in range(0, len(data), len(data) // 12):
        write(path, data[:size], b"")
        try:
            np.testing.assert_allclose(runtime.load(path)(X), np.tanh(X), rtol=1e-6)
        except ValueError as error:
            assert str(error).startswith("load: ")
            refused += 1
    assert refused > 6


def test_compiler_options_of_a_file_that_is_not_trusted_do_not_count(saved, tmp_path):
    """One of them would have XLA write files where the file says."""
    _, parts = saved_plan.read_parts(saved)
    path, dump = tmp_path / "options.plan", tmp_path / "dump"
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    write(path, parts["stablehlo"], b"", options=options)
    runtime.load(path)
    assert not dump.exists()
    runtime.load(path, trusted=True)
    assert dump.exists()


def test_calls_of_other_code_need_trust(tmp_path):
    """A callback's StableHLO calls a target by name, with an address in its options."""
    target = jax.ffi.ffi_call("some_library", jax.ShapeDtypeStruct((4,), jnp.float32))
    check = jax.export.DisabledSafetyCheck.custom_call("some_library")
    exported = jax.export.export(jax.jit(target), disabled_checks=[check])(jnp.ones(4))
    path = tmp_path / "calls.plan"
    write(path, bytes(exported.serialize()), b"")
    with pytest.raises(ValueError, match=r"calls code outside XLA: some_library\. If"):
        runtime.load(path)
    with pytest.raises(ValueError, match=r"cannot be compiled: .*some_library"):
        runtime.load(path, trusted=True)  # which then reaches the compiler


def calls(target, shape, dtype=jnp.float32):
    """A function whose StableHLO says that `target` gives a result of this type."""
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype))


def reduces_over_devices(x):
    mesh = jax.make_mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    psum = functools.partial(jax.lax.psum, axis_name="m")
    return jax.shard_map(
        psum, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(x)


N = jax.export.symbolic_shape("n, 16")
HOSTILE = {
    # what is called writes as many numbers as its operand has, past the result's end
    "lapack_spotrf_ffi": (calls("lapack_spotrf_ffi", (1, 1)), X[:, :4]),
    "lapack_sgetrf_ffi": (jax.scipy.linalg.lu, X[:, :4]),  # honest, and not checked
    "lapack_sgesdd_ffi": (calls("lapack_sgesdd_ffi", (2,)), X),
    "cu_threefry2x32_ffi": (calls("cu_threefry2x32_ffi", (2,)), X),
    "cublas_anything": (calls("cublas_anything", (2,)), X),
    # XLA takes it out and hands float16 numbers on as float32: read past their end
    "Sharding": (calls("Sharding", (4, 16)), X.astype(jnp.float16)),
    "annotate_device_placement": (calls("annotate_device_placement", (8,)), X),
    "SPMDFullToShardShape": (calls("SPMDFullToShardShape", (2**20,)), X),
    # without the attributes that XLA looks for in it, the process ends
    "mhlo.erf": (calls("mhlo.erf", (4, 16)), X),
    "mhlo.topk": (calls("mhlo.topk", (4, 16)), X),
    "Sharding of two": (calls("Sharding of two", (4, 16)), X),
    "stablehlo.composite of other.name": (
        jax.lax.composite(jnp.sin, name="other.name"),
        X,
    ),
    "stablehlo.all_reduce": (reduces_over_devices, X),
    "of tensor<?x16xf32>": (jnp.sin, jax.ShapeDtypeStruct(N, jnp.float32)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_write_past_a_buffer_needs_trust(tmp_path, name):
    """Whatever it is called: names alone said that a call of LAPACK does no harm.

    The tests before this one had targets whose names were refused, and none that lied
    about its result.
    """
    f, x = HOSTILE[name]
    check = jax.export.DisabledSafetyCheck.custom_call(name)
    exported = jax.export.export(jax.jit(f), disabled_checks=[check])(x)
    path = tmp_path / "hostile.plan"
    write(path, bytes(exported.serialize()), b"")
    with pytest.raises(ValueError, match=rf"load: .*{re.escape(name)}.*trusted=True"):
        runtime.load(path)


def test_plain_models_need_no_trust(tmp_path):
    """Each operation that is let through, where some model has it."""

    def every_kind(x, key):
        mesh = jax.make_mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("m"))
        x = jax.lax.with_sharding_constraint(x, rows)
        top, index = jax.lax.top_k(jax.lax.erf(x), 3)
        image = jnp.ones((1, 1, 8, 8)) + jnp.sum(top)
        window = (1, 1, 2, 2)
        pooled = jax.lax.reduce_window(image, 0.0, jax.lax.add, window, window, "SAME")
        kernel = jnp.ones((1, 1, 3, 3))
        return (
            jnp.fft.rfft(x).real + jax.random.normal(key, (4, 9)),
            jnp.sort(x)[:, index[0]] + jnp.cumsum(x, 0)[:, index[0]],
            jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, x)),
            jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME") * pooled.sum(),
            jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x).at[index[0]].add(1.0),
            jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8) >> 2,
            jax.grad(lambda x: jnp.sum(jax.nn.gelu(softmax(x)) @ x.T))(x),
        )

    def small(x, key):
        return [jnp.asarray(y) for y in jax.tree.leaves(every_kind(x, key))]

    path, key = tmp_path / "plain.plan", jax.random.PRNGKey(0)
    with backend("xla"):
        plan = runtime.compile(small, X, key)
    plan.save(path)
    for a, b in zip(runtime.load(path)(X, key), plan(X, key), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(missing() is not None, reason="no C++ kernels")
def test_a_plan_with_a_cpp_kernel_needs_trust(tmp_path):
    plan = runtime.compile(softmax, X)
    plan.save(tmp_path / "softmax.plan")
    with pytest.raises(ValueError, match="calls code outside XLA: jaxkern_softmax"):
        runtime.load(tmp_path / "softmax.plan")
    again = runtime.load(tmp_path / "softmax.plan", trusted=True)
    np.testing.assert_array_equal(again(X), plan(X))


def test_what_cannot_be_saved_says_why(tmp_path):
    def calls_back(x):
        return jax.pure_callback(lambda x: x, x, x)

    plan = runtime.compile(calls_back, X)
    with pytest.raises(ValueError, match=r"save: jax\.export refuses the function"):
        plan.save(tmp_path / "callback.plan")
    assert not list(tmp_path.iterdir()), "no half-written file stays"
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("m"))
    plan = runtime.compile(jnp.sin, jax.device_put(X, sharding))
    with pytest.raises(ValueError, match="runs on 2 devices"):
        plan.save(tmp_path / "two.plan")


def test_other_platforms(saved, tmp_path):
    path = tmp_path / "cuda.plan"
    runtime.compile(jnp.sin, X).save(path, platforms=("cuda",))
    with pytest.raises(ValueError, match="is for cuda, not for cpu"):
        runtime.load(path)
    runtime.compile(jnp.sin, X).save(path, platforms=("cuda", "cpu"))
    np.testing.assert_allclose(runtime.load(path)(X), np.sin(X), rtol=1e-6)
