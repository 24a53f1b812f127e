"""`jaxkern plan`: the tables and numbers of one decode step."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkern.cpu.cpu_call import missing
from jaxkern.models import load
from jaxkern.models.cache_kind import cache_bytes, new_cache
from jaxkern.models.command_line import main
from jaxkern.models.plan_report import as_json, plan_decode_step, tables
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "m.gguf", "llama"))


def test_tables_and_numbers(path, capsys):
    """Only "above 0" was asked of the flops, and what kernels hide counted as none."""
    arguments = ["plan", path, "--slots", "32", "--batch", "2"]
    assert main([*arguments, "--json", "--weights", "f32", "--backend", "xla"]) == 0
    found = json.loads(capsys.readouterr().out)
    products = 2 * 2 * (2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 288 * 64)
    assert products <= found["flops"] < 1.5 * products
    # every weight is read once, two floating point operations each but the embedding
    assert found["bytes"] > found["memory"]["arguments"] / 2
    assert found["memory"]["aliases"] > 0, "the cache is donated"
    assert sum(found["instructions"].values()) > 10
    plan, step = plan_decode_step(path, batch=2, slots=32)
    import rich

    rich.print(tables(plan))
    shown = capsys.readouterr().out
    for text in ("One decode step", "Instructions", "Memory", "arguments", "a CPU has"):
        assert text in shown
    hidden = sum(i.flops is None for i in plan.instructions())
    arithmetic = re.search(r"arithmetic.*", shown)[0]
    assert ("unknown" if hidden else "MFLOP") in arithmetic
    assert bool(hidden) == (missing() is None), "C++ kernels do not say theirs"
    assert (as_json(plan)["flops"] is None) == bool(hidden)
    logits, cache = plan(*step)
    assert logits.shape == (2, 288) and np.isfinite(logits).all()
    assert all((np.asarray(layer.lengths) == 17).all() for layer in cache)


def test_a_folder(capsys):
    folder = Path(__file__).parent.parent / "golden" / "transformers" / "qwen2_yarn"
    arguments = ["plan", str(folder), "--slots", "16", "--json", "--backend", "xla"]
    assert main([*arguments, "--cache", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flops"] > 0
    config, _ = load(folder, "f32")
    kept = jax.eval_shape(lambda: new_cache(config, 1, 16, "int8"))
    # the donated cache, of whose two layers one array of lengths comes back
    assert found["memory"]["aliases"] == cache_bytes(kept) - 4


@pytest.mark.full
def test_profile(path, capsys):
    assert main(["plan", path, "--slots", "32", "--profile"]) == 0
    shown = capsys.readouterr().out
    assert "one step takes" in shown and " us " in shown


def test_errors(path, capsys):
    assert main(["plan", path, "--slots", "0"]) == 2
    assert "--batch and --slots must be at least 1" in capsys.readouterr().err
    assert main(["plan", "/nonexistent.gguf"]) == 2
    assert "No such file" in capsys.readouterr().err
