"""upload: every leaf where it belongs, once, in the format that was asked for."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import FP8Tensor, dequantize, linear, quantize_int
from jaxkern.runtime import MemoryLimitExceeded, allocated_bytes, memory_limit, upload
from jaxkern.runtime import policy as policy_
from jaxkern.runtime.testing.testing import inject_faults

RNG = np.random.default_rng(0)


def params():
    return {
        "norm": np.ones(16, np.float32),
        "layers": [RNG.standard_normal((8, 16)).astype(np.float32), None],
        "ids": np.arange(3, dtype=np.int32),
    }


def test_the_second_time_nothing_moves():
    first, report = upload(params())
    assert (report.bytes, report.skipped) == (4 * (16 + 8 * 16 + 3), 0)
    assert report.seconds > 0 and "1 int32" in str(report)
    assert report.formats["['layers'][0]"] == "float32"
    second, again = upload(first)
    assert (again.bytes, again.skipped) == (0, 3)
    same = jax.tree.map(lambda a, b: a is b, first, second)
    assert all(jax.tree.leaves(same)) and first["layers"][1] is None


@pytest.mark.parametrize(
    "name", ["bf16", *(pytest.param(n, marks=pytest.mark.full) for n in ("f32", "f16"))]
)
def test_matrices_take_the_dtype_of_the_policy(name):
    out, report = upload(params(), policy=name)
    w = out["layers"][0]
    assert w.dtype == policy_(name).weights and report.formats["['norm']"] == "float32"
    assert out["ids"].dtype == jnp.int32 and out["norm"].dtype == jnp.float32
    again, second = upload(out, policy=policy_(name))
    assert second.bytes == 0 and again["layers"][0] is w


def test_fp8_saturates_and_scales_by_absmax_of_448():
    """D4: a plain cast of the largest value of a row like this is NaN."""
    w = np.float32([[1e4, -3.0, 465.0], [0.25, 1e-3, 0.0]])
    with policy_("fp8"):
        out, report = upload({"w": w, "stack": np.stack([w, 2 * w]), "b": w[0]})
    packed = out["w"]
    assert isinstance(packed, FP8Tensor) and packed.format == "e4m3fn"
    np.testing.assert_allclose(packed.scales, [[1e4 / 448]], rtol=1e-6)
    assert out["stack"].scales.shape == (2, 1, 1) and out["b"].dtype == jnp.float32
    decoded = np.asarray(dequantize(packed))
    np.testing.assert_allclose(decoded[0, 0], 1e4, rtol=1e-6)
    assert np.isnan(np.asarray(jnp.asarray(w).astype(jnp.float8_e4m3fn), float)[0, 0])
    np.testing.assert_allclose(decoded, w, atol=1e4 / 448 * 2.0**-9, rtol=2.0**-4)
    assert "FP8Tensor(e4m3fn" in report.formats["['w']"]
    assert "2 FP8Tensor, 1 float32" in str(report)
    assert report.bytes == 6 + 4 + 12 + 8 + 12
    again, second = upload(out, policy="fp8")
    assert second.bytes == 0 and again["w"] is packed
    np.testing.assert_allclose(
        linear(jnp.ones((1, 3)), packed)[0], decoded.sum(-1), rtol=1e-5
    )


def test_shardings_of_arrays_and_of_packed_weights():
    mesh = jax.make_mesh((2,), ("m",))
    rows, whole = NamedSharding(mesh, P("m", None)), NamedSharding(mesh, P())
    tree = {"w": np.ones((8, 32), np.float32), "q": quantize_int(jnp.ones((8, 32)))}
    out, report = upload(tree, sharding={"w": rows, "q": rows}, policy="fp8")
    assert out["w"].codes.sharding.is_equivalent_to(rows, 2)
    assert out["w"].scales.sharding.is_equivalent_to(whole, 2)
    assert all(a.sharding.mesh == mesh for a in jax.tree.leaves(out["q"]))
    assert report.skipped == 0
    _, again = upload(out, sharding=rows, policy="fp8")  # a prefix of the tree
    assert (again.skipped, again.bytes) == (2, 0)
    with pytest.raises(ValueError, match="divi"):
        upload(np.ones((3, 4)), sharding=rows)
    device = jax.devices()[5]
    on_device, _ = upload(tree, sharding=device)
    assert {d for a in jax.tree.leaves(on_device) for d in a.devices()} == {device}
    stays, report = upload(on_device)
    assert report.skipped == 2 and stays["w"].devices() == {device}


def test_the_limit_is_asked_before_anything_moves(quiet_memory):
    tree = {"w": np.ones((64, 64), np.float32), "v": np.ones((32, 64), np.float32)}
    used = allocated_bytes()
    packed = 64 * 64 + 4 + 32 * 64 + 4
    need = packed + 64 * 64 * 4  # and the largest in float32, while it is converted
    with memory_limit(used + need - 1), inject_faults("upload", 99) as plan:
        with pytest.raises(MemoryLimitExceeded, match="upload: needs") as e:
            upload(tree, policy="fp8")
    assert plan.hits == 0 and allocated_bytes() == used
    assert e.value.breakdown == {"weights": packed, "conversion": 64 * 64 * 4}
    with memory_limit(used + need):
        upload(tree, policy="fp8")


def test_a_failure_on_the_way_is_raised_and_a_retry_goes_on():
    tree = params()
    with inject_faults("upload", after=1) as plan:
        with pytest.raises(jax.errors.JaxRuntimeError, match="injected at upload"):
            upload(tree)
        out, report = upload(tree)
    assert plan.hits == 2 + 3 and report.skipped == 0
    np.testing.assert_array_equal(out["layers"][0], tree["layers"][0])


def test_a_bar_where_it_is_asked_for(capsys, monkeypatch):
    upload(params())
    assert capsys.readouterr().err == ""
    upload(params(), progress=True)
    assert "588/588" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install rich"):
        upload(params(), progress=True)


def test_not_under_a_transformation_and_no_such_policy():
    with pytest.raises(TypeError, match="upload: called under a transformation"):
        jax.jit(lambda x: upload(x)[0])(jnp.ones(3))
    with pytest.raises(ValueError, match="policy: must be one of"):
        upload({}, policy="int8")


def test_threads_upload_their_own_policy():
    results = {}

    def work(name):
        with policy_(name):
            results[name] = upload(params())[0]["layers"][0].dtype

    threads = [threading.Thread(target=work, args=(n,)) for n in ("f16", "bf16", "f32")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {n: policy_(n).weights for n in ("f16", "bf16", "f32")}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4)])
def test_empty_matrices_in_fp8(shape, kind):
    """Other tests upload matrices of some numbers."""
    axis_types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("m",), axis_types=axis_types)
    for spec in (P("m"), P(None, "m"), P()):
        moved, report = upload(
            {"w": jnp.zeros(shape)}, policy="fp8", sharding=NamedSharding(mesh, spec)
        )
        assert dequantize(moved["w"]).shape == shape
        assert report.bytes == moved["w"].nbytes
