"""What a token of a step costs, and how that is said.

MFU of a packed model counted bytes in the place of weights.
"""

import sys

import jax
import numpy as np
import pytest

from jaxkern.models import load
from jaxkern.models.loader import open_model
from jaxkern.models.registry import described
from jaxkern.train.arithmetic import (
    active_weights,
    limit_of,
    operations_per_token,
    utilisation,
)
from jaxkern.train.journal import Screen
from tests.models.test_architectures import FOLDERS
from tests.models.tiny_gguf import write_tiny_gguf


def test_every_weight_of_a_product_counts_once(tmp_path):
    """Tied or not, packed or not."""
    for name in ("llama", "gemma2"):
        model = described(open_model(FOLDERS[name]))
        _, weights = load(FOLDERS[name], "train")
        sizes = [w.size for w in jax.tree.leaves(weights) if w.ndim == 2]
        untied = weights.embedding.size if weights.output else 0
        assert active_weights(model) == sum(sizes) - untied
    config, packed = model.config, write_tiny_gguf(tmp_path / "m.gguf", "llama")
    d, f, v, qkv = 64, 96, 288, 64 + 2 * 32
    expected = v * d + 2 * (qkv * d + d * d + 3 * d * f)
    assert active_weights(described(open_model(packed))) == expected
    length, forward = 10, active_weights(model)
    seen = 2 * config.layers * config.heads * config.head_dim * length
    assert operations_per_token(model, length) == 6 * forward + 3 * seen
    assert operations_per_token(model, length, frozen=True) == 4 * forward + 3 * seen


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_every_model_has_a_count(name):
    """Between the weights of its products and those with its attention in a row."""
    model = described(open_model(FOLDERS[name]))
    least = 6 * active_weights(model)
    assert least > 0
    assert least <= operations_per_token(model, 8) < least + 1e6


def test_of_experts_the_chosen_ones_count():
    model = described(open_model(FOLDERS["qwen3_moe"]))
    (block, *_) = model.config.feed_forwards
    sizes = {n: np.prod(s) for n, s in model.tensors.items() if len(s) > 1}
    experts = sum(s for n, s in sizes.items() if "_exps." in n)
    rest = sum(sizes.values()) - experts - sizes["token_embd.weight"]
    expected = rest + experts * block.chosen / block.experts
    assert active_weights(model) == pytest.approx(expected) and experts > 0


def test_a_limit_is_known_by_the_name_of_the_device():
    kinds = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
    assert [round(limit_of(k) / 1e12) for k in kinds] == [989, 989, 312]  # pyright: ignore
    assert round(limit_of("NVIDIA H100 PCIe") / 1e12) in (756, 757)  # pyright: ignore
    assert limit_of("cpu") is None and limit_of("NVIDIA H2000") is None
    assert utilisation(1e3, 1e9, "bfloat16") is None  # of this CPU


def test_a_terminal_gets_a_bar_and_a_file_lines(monkeypatch, capsys):
    def said(terminal):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
        screen = Screen(4, 1, 2, quiet=False)
        assert screen.is_behind() == terminal
        for i in (2, 3):
            screen.step(i, "loss 1.5")
        screen.say("a [word]")
        screen.close()
        return capsys.readouterr().err

    assert said(False) == "step 2 of 4: loss 1.5\na [word]\n"
    bar = said(True)
    assert "3/4" in bar and "loss 1.5" in bar and "a [word]" in bar
