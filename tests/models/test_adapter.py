"""Low-rank adapters: against `peft`, on quantised products, in every kind of file.

Nothing had adapters before: a folder of PEFT was no argument of `load`.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkern import InterleavedTensor, cross_entropy, dequantize, requantize
from jaxkern.models import load
from jaxkern.models.adapted import Adapted, LowRank, adapters_of, with_adapters
from jaxkern.models.adapter import (
    AdapterError,
    NewAdapter,
    product_name,
    read_adapter,
    write_adapter,
)
from jaxkern.models.architecture import page_of
from jaxkern.models.command_line import main
from jaxkern.models.loader import load_described, open_model
from jaxkern.models.products import JustNumerics, gated, project
from jaxkern.models.registry import described
from jaxkern.primitives.quant.interleaved_tensor import interleaved
from tests.models.folder_gguf import write_gguf_of
from tests.models.tiny_gguf import write_tiny_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
SAVED = GOLDEN / "peft_lora"
TARGETS = {
    "llama": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "qwen3_next": ("q_proj", "v_proj", "in_proj_ba", "out_proj"),
}
RANK, ALPHA = 3, 6.0


@functools.cache
def base_of(name):
    (folder,) = GOLDEN.glob(f"transformers_*/{name}")
    return folder


def adapted(name):
    """The model's description, and its weights with adapters that change it."""
    model = described(open_model(base_of(name)))
    source = NewAdapter(RANK, ALPHA, TARGETS[name], seed=1)
    _, weights = load_described(model, "f32", source)
    draws = np.random.default_rng(2)
    return model, with_adapters(
        weights,
        {
            n: LowRank(p.a, jnp.float32(0.2 * draws.standard_normal(p.b.shape)))
            for n, p in adapters_of(weights).items()
        },
    )


def write(name, folder):
    model, weights = adapted(name)
    write_adapter(folder, model, weights, rank=RANK, alpha=ALPHA, base=name)


def logits_of(config, weights, tokens):
    page = page_of(config)
    x, _ = page.hidden_states(config, weights, tokens[None])
    return page.logits(config, weights, x)[0]


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("qwen3_next", marks=pytest.mark.full)]
)
def test_logits_and_gradients_are_those_of_peft(name, tmp_path):
    """From the folder that jaxkern saved and peft read."""
    write(name, tmp_path / "adapter")
    ours, theirs = read_adapter(tmp_path / "adapter"), read_adapter(SAVED / name)
    assert ours.factors.keys() == theirs.factors.keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        dict(ours.factors),
        dict(theirs.factors),
    )
    golden = dict(np.load(SAVED / name / "golden.npz"))
    config, weights = load(base_of(name), "f32", adapter=SAVED / name)
    tokens = jnp.asarray(golden["tokens"])

    @functools.partial(jax.grad, has_aux=True)
    def loss(adapters):
        logits = logits_of(config, with_adapters(weights, adapters), tokens)
        return cross_entropy(logits[:-1], tokens[1:]).mean(), logits

    grads, logits = jax.jit(loss)(adapters_of(weights))
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
    model = described(open_model(base_of(name)))
    assert len(grads) * 2 + 2 == len(golden)
    for tensor, grad in grads.items():
        for factor in "ab":
            truth = golden[f"{factor}.{product_name(model, tensor)}"]
            np.testing.assert_allclose(
                getattr(grad, factor), truth, rtol=0, atol=1e-4, err_msg=tensor
            )
    assert max(abs(v).max() for k, v in golden.items() if k[:2] == "b.") > 1e-2
    without, _ = load_described(model, "f32")
    assert without == config


def test_a_gguf_file_takes_the_adapter_of_its_folder(tmp_path):
    """Whose rows of q and k lie in another order; also merged, and saved again."""
    path = write_gguf_of(base_of("llama"), tmp_path / "m.gguf")
    tokens = jnp.arange(9) * 7 % 96
    expected = logits_of(*load(base_of("llama"), "f32"), tokens)
    folder = load(base_of("llama"), "f32", adapter=SAVED / "llama")
    expected, before = logits_of(*folder, tokens), expected
    assert abs(expected - before).max() > 0.5, "the adapter says nothing"
    for options in ({}, {"merge": True}):
        found = logits_of(
            *load(path, "f32", adapter=SAVED / "llama", **options), tokens
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    model = described(open_model(path))
    _, weights = load_described(model, "f32", read_adapter(SAVED / "llama"))
    write_adapter(tmp_path / "again", model, weights, rank=RANK, alpha=ALPHA)
    same, truth = read_adapter(tmp_path / "again"), read_adapter(SAVED / "llama")
    jax.tree.map(np.testing.assert_array_equal, same.factors, truth.factors)


CONTAINERS = {
    "Q8_0": lambda w: requantize(w, "Q8_0"),
    "interleaved": lambda w: interleaved_rows(requantize(w, "Q8_0")),
    "affine": lambda w: requantize(w, "affine", bits=4, group_size=32),
    "int4": lambda w: requantize(w, "int", bits=4, group_size=32),
}


def interleaved_rows(w):
    tiles = interleaved(np.asarray(w.blocks), w.qtype)
    return InterleavedTensor(jnp.asarray(tiles), w.qtype)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_gradients_through_quantised_products(kind):
    """Of x and both factors, beside a base that is decoded; the norm before, too."""
    draws = np.random.default_rng(0)
    d, f, r = 256, 32, 3
    w = jnp.float32(draws.standard_normal((f, d)) / 16)
    base = CONTAINERS[kind](w)
    own = Adapted(
        (base,),
        (LowRank(*(jnp.float32(draws.standard_normal(s)) for s in ((r, d), (f, r)))),),
        ("w",),
        (f,),
        (0.5,),
    )
    dense = dequantize(base)
    x, dy = (jnp.float32(draws.standard_normal((5, n))) for n in (d, f))
    numerics = JustNumerics(1e-5, None, False)

    def ours(x, part):
        w = Adapted(own.base, (part,), own.names, own.widths, own.scales)
        return project(numerics, x, (w,), jnp.ones(d) * 1.5, residual=dy)

    def plain(x, part):
        x = 1.5 * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        with jax.default_matmul_precision("highest"):
            return dy + x @ dense.T + 0.5 * (x @ part.a.T) @ part.b.T

    y, pull = jax.vjp(jax.jit(ours), x, own.parts[0])
    truth, pull_truth = jax.vjp(plain, x, own.parts[0])
    scale = float(abs(truth).max())
    np.testing.assert_allclose(y, truth, rtol=0, atol=1e-5 * scale)
    for a, b in zip(*map(jax.tree.leaves, (pull(dy), pull_truth(dy))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(abs(b).max()))


def test_a_gate_with_adapters_is_the_gate_of_the_sums():
    """Half of the rows have one: the others get zeros."""
    draws = np.random.default_rng(0)
    w, a, b, x = (
        jnp.float32(draws.standard_normal(s)) for s in ((12, 8), (2, 8), (6, 2), (3, 8))
    )
    own = Adapted((w,), (None, LowRank(a, b)), ("g", "u"), (6, 6), (0.0, 2.0))
    numerics = JustNumerics(1e-5, None, False)
    found = gated(numerics, x, (own,))
    whole = w + own.dense()
    np.testing.assert_allclose(found, gated(numerics, x, (whole,)), rtol=1e-4)
    np.testing.assert_array_equal(whole[:6], w[:6])


def changed(folder, **keys):
    said = json.loads((folder / "adapter_config.json").read_text()) | keys
    (folder / "adapter_config.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(r=2), "ranks 3 and 3, r is 2"),
        (dict(lora_alpha=float("inf")), "lora_alpha inf, expected .* a finite number"),
        (dict(use_rslora="false"), "use_rslora .* is 'false', expected true or false"),
        (dict(use_dora=True), "key use_dora of adapter_config.json is True"),
        (dict(bias="all"), "key bias of adapter_config.json is 'all'"),
        (dict(rank_pattern={"q_proj": 4}), "rank_pattern .* not understood"),
        (dict(init_lora_weights="pissa"), "init_lora_weights .* 'pissa'"),  # W differs
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(peft_type="IA3"), "not that of a LoRA adapter"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(change, message, tmp_path):
    for file in (SAVED / "llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    changed(tmp_path, **change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path, capsys):
    with pytest.raises(
        AdapterError, match=r"q_proj is of a matrix 32 x 32, .* 48 x 32"
    ):
        load(base_of("mistral_window"), "f32", adapter=SAVED / "llama")
    lost = tmp_path / "lost"
    write("llama", lost)
    tensors = load_file(lost / "adapter_model.safetensors")
    tensors = {k.replace("o_proj", "out_proj"): v for k, v in tensors.items()}
    save_file(tensors, lost / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"out_proj is no product that can have an"):
        load(base_of("llama"), "f32", adapter=lost)
    with pytest.raises(AdapterError, match=r"has no product 'wq', but q_proj, k_proj"):
        model = described(open_model(base_of("llama")))
        load_described(model, "f32", NewAdapter(2, 2.0, ["wq"]))
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen2")
    arguments = ["generate", "--model", str(path), "--prompt", "x", "--quiet"]
    assert main([*arguments, "--merge"]) == 2
    assert "--merge: there is no --adapter" in capsys.readouterr().err


def test_a_quantised_base_refuses_to_be_merged(tmp_path):
    path = write_gguf_of(base_of("llama"), tmp_path / "m.gguf", quantized=True)
    with pytest.raises(
        ValueError, match="is quantised, so the adapter cannot be merged"
    ):
        load(path, "packed", adapter=SAVED / "llama", merge=True)


if __name__ == "__main__":
    for name in TARGETS:
        write(name, SAVED / name)
