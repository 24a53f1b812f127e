"""The self-test for Macs, tested where there is none: on the CPU."""

import jax
import numpy as np
import pytest

import jaxkern as jk
from jaxkern.lowering.apple import selftest
from jaxkern.lowering.apple.declared_sample import declared_sample
from jaxkern.lowering.apple.samples import GROUPS, Draw, samples
from jaxkern.lowering.explain import equations
from tests.test_every_op import OPS


def test_every_op_is_named_or_declares_its_call():
    """That the calls are right is seen with `make test-full` only: seven had none."""
    named = {n.partition(":")[0] for group in GROUPS for n in group(Draw())}
    for p in OPS:
        if p.name not in named:
            f, args = declared_sample(p.name, Draw())
            traced = jax.make_jaxpr(f)(*args).jaxpr
            assert p.name in {eqn.primitive.name for eqn in equations(traced)}, p.name


@pytest.mark.full
def test_every_op_has_a_sample():
    """Also the ones to come: `samples` must call each declared primitive."""
    sampled = set()
    for name, (f, args) in samples().items():
        found = {
            eqn.primitive.name for eqn in equations(jax.make_jaxpr(f)(*args).jaxpr)
        }
        called = name.partition(":")[0]
        assert {called, f"{called}_tree"} & found, name
        sampled.add(called)
    assert {p.name for p in OPS} == sampled


@pytest.mark.full
def test_on_the_cpu(tmp_path):
    report = tmp_path / "report.txt"
    assert selftest.main(["--platform", "cpu", "--report", str(report)]) == 0
    text = report.read_text()
    assert "0 failed" in text and "attention gradient" in text and "jaxlib: " in text


def test_report_and_failures(tmp_path, monkeypatch, capsys):
    """A device that adds, one that raises, and one that gives NaN."""

    def broken(x):
        raise FloatingPointError("no such operation")

    x = np.ones((2, 16), np.float32)
    calls = {"rms_norm": (jk.rms_norm, (x,)), "broken": (broken, (x,))}
    monkeypatch.setattr(selftest, "samples", lambda: calls)
    monkeypatch.setattr(selftest, "has_gradient", lambda f, args: f is jk.rms_norm)
    path = tmp_path / "report.txt"
    assert selftest.main(["--platform", "cpu", "--report", str(path)]) == 1
    assert "3 calls, 1 failed" in capsys.readouterr().out
    assert "FAILED        -  broken  FloatingPointError: no such" in path.read_text()
    assert "ok      0.0e+00  rms_norm gradient" in path.read_text()


def test_judgement():
    one = np.ones(4, np.float32)
    assert not selftest.judge("same", [one], [one]).trouble
    assert "differs" in selftest.judge("scaled", [one * 1.01], [one]).trouble
    assert "NaN" in selftest.judge("nan", [one], [one * np.nan]).trouble
    assert "differs" in selftest.judge("nan", [one * np.nan], [one]).trouble
    assert "not float32" in selftest.judge("dtype", [one.astype(int)], [one]).trouble
    assert (
        "integers" in selftest.judge("ids", [np.arange(3)], [np.ones(3, int)]).trouble
    )


def test_no_device(capsys):
    assert selftest.main([]) == 2
    assert "no Apple platform" in capsys.readouterr().err


def test_an_op_that_no_group_names_has_the_call_that_it_declares():
    """Else a new op turned the self-test red until a sample of it was written."""
    assert not any("dynamic_tanh" in group(Draw()) for group in GROUPS)
    [(name, (f, args))] = samples("dynamic_tanh").items()
    assert name == "dynamic_tanh" and f is jk.dynamic_tanh
    assert [x.shape for x in args] == [(2, 3, 4), (), (4,), (4,)]
    assert np.isfinite(f(*args)).all()


def test_what_no_annotation_tells_must_be_written():
    with pytest.raises(ValueError, match="embedding: `ids` is no array of floats: add"):
        declared_sample("embedding", Draw())
    with pytest.raises(ValueError, match="kept_tokens: no public function has this"):
        declared_sample("kept_tokens", Draw())
