"""`tuned`: when "auto" follows a table, and which tables are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern import backend, explain, rms_norm, softmax, tuned
from jaxkern.lowering.lower import lower
from jaxkern.lowering.measured import call_key
from jaxkern.lowering.tuned import every_op, header
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.call import Call
from jaxkern.testing.checks import own_rows

X = jnp.linspace(-1.0, 1.0, 16 * 8).reshape(16, 8)
XLA, CPP = "xla: softmax_reference", "cpp: tests.lowering.test_tuned.doubled"


def doubled(x, mask, *, scale):
    """Twice what the op means, so that values say who has run."""
    return 2 * jax.nn.softmax(x * scale, -1)


@pytest.fixture
def row():
    with own_rows(softmax_p):
        lower(softmax_p, "cpu", "cpp", fwd=None, primal=doubled)
        yield
    jax.clear_caches()


def entry(choice, **changes):
    times = {XLA: 2.0, CPP: 1.0}
    return {"date": "2026-11-27", "microseconds": times, "left": {}} | {
        "choice": choice,
        **changes,
    }


def key(*shape):
    return f"softmax(x=float32[{','.join(map(str, shape))}]; scale=1.0)"


@pytest.fixture
def write(tmp_path):
    """Writes a table of choices by shape; gives its path, which is always the same."""

    def written(choices, **changes):
        calls = {key(*shape): entry(choice) for shape, choice in choices.items()}
        table = header() | {"calls": calls} | changes
        path = tmp_path / "table.json"
        path.write_text(json.dumps(table))
        return path

    return written


def runs(f, x=X):
    """Which implementation made the values: of each row the sum is 1 or 2."""
    return {1: "xla", 2: "cpp"}[round(float(np.asarray(f(x))[0].sum()))]


def test_a_compiled_function_follows_the_table_of_its_call(row, write):
    """Before, inside, with a changed file at the same path, and afterwards."""
    f = jax.jit(lambda x: softmax(x))
    assert runs(f) == "cpp"
    with tuned(write({(16, 8): XLA})):
        assert (runs(f), runs(softmax)) == ("xla", "xla")
        assert runs(f, X[:4]) == "cpp"  # of which the table has nothing
    with tuned(write({(16, 8): CPP})):
        assert (runs(f), runs(softmax)) == ("cpp", "cpp")
    with tuned(write({(16, 8): XLA})):
        assert runs(f) == "xla"
        made = jax.make_jaxpr(f)(X)
    assert runs(f) == "cpp"
    assert runs(lambda x: eval_jaxpr(made.jaxpr, made.consts, x)[0]) == "xla"
    assert "auto tuned" in str(made)


def test_a_backend_that_is_named_counts_more(row, write):
    with tuned(write({(16, 8): XLA})):
        assert runs(softmax) == "xla"
        with backend("cpp"):
            assert runs(softmax) == "cpp"
        with backend("auto", strict=True):  # the kernel could run
            assert runs(softmax) == "xla"
    with backend("cpp"), tuned(write({(16, 8): XLA})):
        assert runs(softmax) == "cpp"


def test_a_mapped_call_is_another_call(tmp_path):
    """A weight for each example: the axis is recorded, and the rules decide."""
    path, weights = tmp_path / "table.json", jnp.ones((2, 8))
    name = "rms_norm(x=float32[16,8], weight=float32[8]; eps=1e-06, offset=0.0)"
    kernel = "cpp: cpu.norm.rms_norm.rms_norm_fwd"
    call = entry(kernel, microseconds={kernel: 1.0})
    path.write_text(json.dumps(header() | {"calls": {name: call}}))
    mapped = jax.vmap(rms_norm, (None, 0))
    with tuned(path):
        assert explain(rms_norm, X, weights[0]).rows[0].runs == kernel
        [found] = explain(mapped, X, weights).rows
    assert found.measured.endswith("has no call with these operands")
    assert found.runs == explain(mapped, X, weights).rows[0].runs


def test_explain_says_what_was_measured(row, write):
    path = write({(16, 8): XLA})
    with tuned(path):
        [found] = explain(softmax, X).rows
        assert found.runs == XLA and found.refused == ()
        assert found.measured == f"measured 2026-11-27: {CPP} 1 us, {XLA} 2 us"
        assert f"  {found.measured}\n" in f"{explain(softmax, X)}\n"
        [other] = explain(softmax, X[:4]).rows
        assert other.runs == CPP
        assert other.measured == f"not measured: {path} has no call with these operands"
        [elsewhere] = explain(softmax, X, platform="tpu").rows
        assert elsewhere.measured == f"not measured: {path} is of cpu"
    assert explain(softmax, X).rows[0].measured == ""


def test_a_choice_that_refuses_is_not_run(write):
    path = write({(16, 8): CPP})
    reasons = []
    with own_rows(softmax_p):
        lower(
            softmax_p,
            "cpu",
            "cpp",
            fwd=None,
            primal=doubled,
            unsupported=lambda **_: "; ".join(reasons) or None,
        )
        with tuned(path):
            assert runs(softmax) == "cpp"
            reasons.append("no library")
            [found] = explain(softmax, X).rows
    jax.clear_caches()
    assert found.runs == XLA
    assert found.measured == f"measured 2026-11-27, but {CPP} does not run here"
    assert found.refused == ("tests.lowering.test_tuned.doubled: no library",)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_the_table_is_for_what_a_device_has(kind, row, write):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        with tuned(write({(16, 8): XLA})):
            assert runs(jax.jit(softmax), x) == "cpp"
            if kind == AxisType.Explicit:
                [found] = explain(softmax, x).rows
                assert found.measured.endswith("the operands are cut over a mesh")
        with tuned(write({(2, 8): XLA})):
            assert runs(jax.jit(softmax), x) == "xla"


def test_a_key_says_all_that_matters():
    def key_of(name, *avals, call=None, **static):
        return call_key(every_op()[name], avals, call or Call(precision=None), static)

    x = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    call = Call(absent=(1,), precision="highest", wanted=(True,), vmaps=((0,),))
    assert key_of("softmax", x, call=call, scale=1.0) == (
        "softmax(x=bfloat16[2,3]; matmul_precision='highest', scale=1.0, "
        "vmaps=((0,),), wanted=(True,))"
    )
    as_type, as_dtype = (
        key_of("softmax", x, call=Call(absent=(1,), precision=None), dtype=dtype)
        for dtype in (jnp.float32, jnp.dtype("float32"))
    )
    assert as_type == as_dtype == "softmax(x=bfloat16[2,3]; dtype=float32)"
    assert key_of("top_k", x, k=2) == "top_k(x=bfloat16[2,3]; k=2)"


FOREIGN = header()["versions"] | {"jaxkern": "0.0.1"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"device": "NVIDIA H200"}, "is of device NVIDIA H200, here it is "),
        ({"platform": "cuda"}, "is of platform cuda, here it is cpu"),
        ({"versions": FOREIGN}, r"is of versions .*'jaxkern': '0\.0\.1'"),
        ({"format": 2}, "is of format 2, here it is 1"),
        ({"format": "1"}, "is no table of times: it needs format, platform, device"),
        ({"more": 1}, "is no table of times: it needs format"),
        ({"calls": {"sofmax(x)": entry(XLA)}}, "call 'sofmax.*: there is no such op"),
        ({"calls": {key(2): entry("xla")}}, "its choice 'xla' has no time"),
        ({"calls": {key(2): {}}}, "it needs date, microseconds, left, choice"),
        ({"calls": {key(2): entry(XLA, date=1)}}, "`date` is 1"),
        ({"calls": {key(2): entry(XLA, left={"cpp": 1})}}, "`left` is {'cpp': 1}"),
        (
            {"calls": {key(2): entry(XLA, microseconds={XLA: 0})}},
            "'xla: softmax_reference' takes 0 microseconds",
        ),
        (
            {"calls": {key(2): entry("x", microseconds={"x": 1.0})}},
            "'x' is none of 'xla: softmax_reference', 'cpp: cpu.activation",
        ),
    ],
)
def test_a_table_that_does_not_count_here_is_refused(changes, message, write):
    path = write({}, **changes)
    with pytest.raises(ValueError, match=f"^tuned: {path}.*{message}"):
        tuned(path)


def test_what_is_no_table_is_refused(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(FileNotFoundError, match=r"^tuned: there is no .*autotune"):
        tuned(path)
    for text in ("{", "[1, 2]", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"^tuned: .* is no table of times: "):
            tuned(path)


def test_gradients_follow_the_table_of_their_call(tmp_path):
    """The backward pass is traced after the block has ended."""
    path = tmp_path / "table.json"
    f = lambda x: softmax(x)[:, 0].sum()  # noqa: E731
    usual = {row.op: row.runs for row in explain(jax.grad(f), X).rows}
    assert usual["softmax_bwd"].startswith("cpp")
    name = "softmax_bwd(y=float32[16,8], dy=float32[16,8]; scale=1.0, wanted=(True,))"
    reference = "xla: softmax_bwd_reference"
    call = entry(reference, microseconds={reference: 1.0})
    path.write_text(json.dumps(header() | {"calls": {name: call}}))

    def gradient(x):
        with jaxkern.tuned(path):
            _, pull = jax.vjp(f, x)
        return pull(1.0)

    found = {row.op: row.runs for row in explain(gradient, X).rows}
    assert found["softmax_bwd"] == reference
    np.testing.assert_allclose(gradient(X)[0], jax.grad(f)(X), atol=1e-6)
