"""`autotune`: what is measured of which calls, what is chosen, what is written."""

import importlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxkern
from jaxkern import explain, rms_norm, softmax, top_k
from jaxkern.lowering.lower import lower
from jaxkern.lowering.tuned import default_path
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.testing import autotune
from jaxkern.testing.agreement import disagreement
from jaxkern.testing.call_sites import call_sites
from jaxkern.testing.checks import own_rows

X = jax.random.normal(jax.random.key(0), (8, 64))


@pytest.fixture
def clock(monkeypatch):
    """Sets the seconds that implementations take, by kind, and the whole function."""

    def set_to(**seconds):
        def seconds_of(functions, sets, device):
            del sets, device
            return {name: seconds[name.partition(":")[0]] for name in functions}

        module = importlib.import_module("jaxkern.testing.autotune")
        monkeypatch.setattr(module, "seconds_of", seconds_of)

    set_to(xla=2e-6, cpp=1e-6, usual=5e-6, tuned=4e-6)
    return set_to


def largest(x):
    return top_k(x, 4)[0] * 2


def test_what_is_faster_is_chosen_and_explained(clock, tmp_path):
    path = tmp_path / "table.json"
    assert explain(largest, X).rows[0].runs == "xla: top_k_reference"
    found = autotune(largest, X, path=path)
    [call] = found.calls
    assert (call.key, call.sites) == ("top_k(x=float32[8,64]; k=4)", 1)
    assert call.usual == "xla: top_k_reference"
    assert call.choice == "cpp: cpu.index.top_k.top_k"
    with jaxkern.tuned(path):
        [row] = explain(largest, X).rows
        text = jax.jit(largest).lower(X).as_text()
        tuned = jax.jit(largest)(X)
        [other] = explain(largest, X[:4]).rows
    assert row.runs == call.choice and "jaxkern_top_k" in text
    assert row.measured.startswith("measured 2")
    assert row.measured.endswith(f"{call.choice} 1 us, {call.usual} 2 us")
    np.testing.assert_array_equal(tuned, largest(X))
    assert other.runs == "xla: top_k_reference"
    assert other.measured == f"not measured: {path} has no call with these operands"
    assert str(found).splitlines() == [
        f"{path}: 1 call on {found.device}",
        call.key,
        f"  {1:10} us  {call.choice}, chosen",
        f"  {2:10} us  {call.usual}, usual",
        "the whole function: 5 us usual, 4 us tuned",
    ]


def test_a_kernel_that_is_slower_here_is_left(clock, tmp_path):
    clock(xla=1e-6, cpp=2e-6, usual=5e-6, tuned=4e-6)
    f = jax.grad(lambda x: softmax(x)[0, 0])
    _, call = autotune(f, X, path=tmp_path / "t").calls
    assert call.key.startswith("softmax_bwd(y=float32[8,64], dy=float32[8,64]; scale=")
    assert call.usual.startswith("cpp") and call.choice.startswith("xla")


def test_little_is_no_reason_to_change(clock, tmp_path):
    clock(xla=1e-6, cpp=0.98e-6)
    [call] = autotune(largest, X, path=tmp_path / "t").calls
    assert call.choice == call.usual == "xla: top_k_reference"


def test_what_is_faster_alone_and_not_in_its_place_is_given_up(clock, tmp_path):
    """Of two new choices the one that gains less goes, then there is nothing to add."""

    def both(x):
        return top_k(x, 4)[0] + top_k(rms_norm(x), 4)[0]

    clock(xla=2e-6, cpp=1e-6, usual=4e-6, tuned=5e-6)
    found = autotune(both, X, path=tmp_path / "t")
    assert [c.key.partition("(")[0] for c in found.calls] == ["top_k", "rms_norm"]
    assert [c.choice for c in found.calls] == [c.usual for c in found.calls]
    assert found.function == {}
    with jaxkern.tuned(tmp_path / "t"):
        refused = explain(both, X).rows[0].refused
    assert refused == (
        "cpp: cpu.index.top_k.top_k: it takes 1 us alone, but with the new choices "
        "the function takes 5 us, 4 us without",
    )


def off_by_two_percent(x, mask, *, scale):
    assert mask is None
    return jax.nn.softmax(x * scale, -1) * jnp.where(x > 2, 1.02, 1.0)


def failing(x, mask, *, scale):
    def fail(x):
        raise RuntimeError("no memory left")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (off_by_two_percent, "differs from the reference: result 0 is off by 0.0"),
        (failing, "does not run: "),
    ],
)
def test_what_is_wrong_is_never_chosen(kernel, reason, clock, tmp_path):
    x = X.at[0, 0].set(3.0)
    with own_rows(softmax_p):
        lower(softmax_p, "cpu", "cpp", fwd=None, primal=kernel)
        [call] = autotune(softmax, x, path=tmp_path / "t").calls
        assert call.usual.startswith("cpp") and call.choice == "xla: softmax_reference"
        assert call.left[call.usual].startswith(reason)
        with jaxkern.tuned(tmp_path / "t"):
            [row] = explain(softmax, x).rows
            assert f"{call.usual}: {reason}" in row.refused[0]
            np.testing.assert_allclose(softmax(x), jax.nn.softmax(x), rtol=1e-5)
    jax.clear_caches()


def test_calls_are_entered_wherever_they_stand():
    """With the operands that they have there: of a loop those of its first step."""
    ids = jnp.array([1, 0, 2])

    def model(x, ids):
        def step(x, row):
            return jax.jit(rms_norm)(x, row), None

        x, _ = jax.lax.scan(step, x, jnp.stack([x[0] + 1, x[0]]), reverse=True)
        x = jax.checkpoint(lambda x: softmax(x + 1, scale=3.0))(x)
        x = jax.lax.while_loop(lambda x: x[0, 0] > 9, lambda x: largest(x[:, ::-1]), x)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: softmax(x), rms_norm, x)
        return jaxkern.embedding(ids, x), jax.vmap(rms_norm)(x, x)

    x = jnp.arange(12.0).reshape(3, 4)
    found, left = call_sites(lambda a: model(*a), (x, ids))
    assert not left
    by_op = {}
    for site in found:
        by_op.setdefault(site.p.name, []).append(site)
    assert {op: len(sites) for op, sites in by_op.items()} == {
        "rms_norm": 3,
        "softmax": 2,
        "top_k": 1,
        "embedding": 1,
    }
    scanned, in_branch, mapped = by_op["rms_norm"]
    np.testing.assert_array_equal(scanned.operands[1], x[0])
    assert len(in_branch.operands) == 1 and len(mapped.call.vmaps) == 1
    assert "vmaps=((0, 0),)" in mapped.key
    np.testing.assert_array_equal(by_op["embedding"][0].operands[0], ids)


def test_calls_that_name_their_backend_or_are_sharded_are_not_measured(clock, tmp_path):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")

    def f(x):
        with jaxkern.backend("xla"):
            x = softmax(x)
        inside = jax.shard_map(largest, mesh=mesh, in_specs=spec, out_specs=spec)
        return rms_norm(inside(x))

    found = autotune(f, X, path=tmp_path / "t")
    assert [call.key.partition("(")[0] for call in found.calls] == ["rms_norm"]
    assert found.not_entered == ("top_k(x=float32[8,64]; k=4)",)
    assert "top_k(x=float32[8,64]; k=4)\n  not measured alone" in str(found)


def test_what_rounding_is_and_what_is_not():
    e = jax.random.normal(jax.random.key(1), (64, 64))
    assert disagreement([e * (1 + 1e-3)], [e], []) is None
    one_wrong = e.at[5, 5].set(0.5 * e[5, 5] + 1)
    assert "result 0 is off by" in str(disagreement([one_wrong], [e], []))
    lost = disagreement([e.at[0, 0].set(jnp.nan)], [e], [])
    assert lost == "result 0 is off by inf, allowed is 0.005"
    masked = e.at[0].set(-jnp.inf)
    assert disagreement([masked], [masked], []) is None
    assert disagreement([e], [masked], []) is not None
    coarse = e.astype(jnp.bfloat16).astype(jnp.float32) * 1.01
    assert disagreement([coarse], [e], []) is not None
    assert disagreement([coarse], [e], [jnp.dtype("bfloat16")]) is None
    ids = jnp.arange(4096)
    assert disagreement([ids.at[3].set(0)], [ids], []) is None
    assert "changes a share of 0.5" in str(disagreement([ids // 2 * 2], [ids], []))
    assert "result 0 is float32[64]" in str(disagreement([e[0]], [e], []))
    none = jnp.zeros((0, 3))
    assert disagreement([none], [none], []) is None


def test_what_cancels_is_compared_with_float64(tmp_path):
    """The gradient of a sum of softmax is zero, and what is found of it rounding."""
    found = autotune(jax.grad(lambda x: softmax(x).sum()), X, path=tmp_path / "t")
    assert all(not call.left for call in found.calls if call.choice == call.usual)
    assert any("softmax_bwd" in call.key for call in found.calls)
    with jax.enable_x64(True):
        exact = jnp.zeros(4)
    noise = jnp.full(4, 1e-9)
    assert disagreement([noise], [-noise], [], lambda: [exact]) is None
    assert disagreement([noise * 9], [-noise], [], lambda: [exact]) is not None


def test_a_table_keeps_what_it_has(clock, tmp_path):
    path = tmp_path / "folder" / "table.json"
    for rows in (8, 4, 8):
        autotune(largest, X[:rows], path=path)
    calls = json.loads(path.read_text())["calls"]
    assert list(calls) == [f"top_k(x=float32[{n},64]; k=4)" for n in (8, 4)]
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_the_default_table_is_below_the_users_cache(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = autotune(largest, X)
    assert found.path == default_path()
    assert found.path.parent == tmp_path / "jaxkern" / "tuned"
    with jaxkern.tuned():
        assert explain(largest, X).rows[0].runs.startswith("cpp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path().parts[-4:-1] == (".cache", "jaxkern", "tuned")


def test_what_is_refused(clock, tmp_path):
    with pytest.raises(ValueError, match=r"^autotune: `rotate` must be at least 1"):
        autotune(largest, X, rotate=0)
    with pytest.raises(TypeError, match=r"^autotune: at least one argument"):
        autotune(largest, 1.0)
    elsewhere = jax.device_put(X, jax.devices()[1])
    with pytest.raises(ValueError, match="a table is of the default device"):
        autotune(largest, elsewhere)
    path = tmp_path / "notes.txt"
    path.write_text("not a table")
    with pytest.raises(ValueError, match=r"^autotune: .*notes\.txt is no table"):
        autotune(largest, X, path=path)
    assert path.read_text() == "not a table"


def test_a_terminal_shows_how_far_it_is(clock, tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    autotune(largest, X, path=tmp_path / "t")
    assert "autotune top_k" in capsys.readouterr().err


def test_times_are_measured(tmp_path):
    """On this machine, whatever is the fastest."""
    w = jaxkern.quantize_gguf(jax.random.normal(jax.random.key(2), (32, 64)), "Q8_0")

    def model(x, w):
        return largest(jaxkern.quantized_matmul(rms_norm(x), w))

    found = autotune(model, X, w, path=tmp_path / "t", rotate=2)
    ops = [call.key.partition("(")[0] for call in found.calls]
    assert ops == ["rms_norm", "quantized_matmul", "top_k"]
    for call in found.calls:
        kinds = [name.partition(":")[0] for name in (*call.microseconds, *call.left)]
        assert sorted(kinds) == ["cpp", "xla"] and call.choice in call.microseconds
        assert all(0 < us < 1e6 for us in call.microseconds.values())
    with jaxkern.tuned(tmp_path / "t"):
        runs = [row.runs for row in explain(model, X, w).rows]
        tuned = jax.jit(model)(X, w)
    assert runs == [call.choice for call in found.calls]
    np.testing.assert_allclose(tuned, model(X, w), rtol=1e-4)
