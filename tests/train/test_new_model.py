"""New models of the registry, and models written as folders.

Models were only read before: no name went the other way.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import cross_entropy
from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.models.loader import open_model
from jaxkern.models.registry import described
from jaxkern.train import AdamW, next_token_loss, readable, train_step
from jaxkern.train.model_folder import origins_of, stored_name, write_model_folder
from jaxkern.train.new_model import NewWeights, new_model
from tests.models.test_architectures import FOLDERS, SEEING

PACKED = {"gpt_oss_mxfp4"}  # nobody trains it so
UNWRITTEN = {"deepseek_v2", "deepseek_v3", "gpt_oss", "kimi_linear", "mistral4"}
UNWRITTEN |= {"gemma4_experts", "mistral3", "qwen3_vl_moe"}
TURNED = {"qwen3_vl_moe"}  # new ones have experts as published, not as now saved
LEFT_OUT = ("model.visual.", "mtp.", "model.vision_tower.", "model.embed_vision.")
LEFT_OUT += ("vision_tower.", "multi_modal_projector.")  # of pages that read text


def keys_of(name):
    return json.loads((FOLDERS[name] / "config.json").read_text())


@pytest.mark.parametrize("name", sorted(FOLDERS.keys() - PACKED))
def test_a_new_model_has_the_tensors_of_a_folder(name):
    """Names as `transformers` writes them, where this model is written."""
    model = new_model(keys_of(name), seed=0)
    stored = read_safetensors_folder(FOLDERS[name]).tensors
    expected = {
        n: info.shape
        for n, info in stored.items()
        if name in SEEING or not n.startswith(LEFT_OUT)
    }
    found = {stored_name(model, n): t.shape for n, t in model.file.tensors.items()}
    if name in TURNED:
        found, expected = (
            {n: tuple(sorted(shape)) for n, shape in shapes.items()}
            for shapes in (found, expected)
        )
    if name in UNWRITTEN:
        assert sorted(found.values()) == sorted(expected.values())
        with pytest.raises(ValueError, match="are not written as a folder"):
            origins_of(model)
    else:
        assert found == expected
        names = [n for origin in origins_of(model) for n in origin.names]
        assert {n for n in names if n in model.file.tensors} == {*model.file.tensors}
        assert len(names) == len({*names})


@pytest.mark.parametrize(
    "name", ["gemma3", "lfm2", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"]
)
def test_what_is_written_is_read(name, tmp_path):
    """Norms that are stored less 1, taps in another form, experts one by one."""
    model = described(open_model(FOLDERS[name]))
    _, weights = load(FOLDERS[name], "train")
    write_model_folder(tmp_path, model, weights, source=str(FOLDERS[name]))
    _, found = load(tmp_path, "train")
    jax.tree.map(np.testing.assert_array_equal, found, weights)


def test_a_decoder_with_scaled_logits_begins_near_chance_and_learns():
    """The loss read a key of llamas alone, which the decoders of hybrids do not have,
    and not that of the scale."""
    keys = keys_of("granitemoehybrid") | {"num_local_experts": 0}
    keys |= {"num_hidden_layers": 1, "layer_types": ["attention"]}
    model = new_model(keys | {"initializer_range": 0.02}, seed=1)
    reader = NewWeights(model.file, model.tensors, "train")
    config = replace(model.config, **reader.numerics)
    weights = model.architecture.weights(config, reader)
    assert config.logit_scale != 1
    step = train_step(next_token_loss(config), AdamW(1e-2), compute_dtype=jnp.float32)
    tokens = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    state, first = step(step.init(weights), tokens)
    assert abs(first.loss - np.log(config.vocabulary)) < 0.5
    page = page_of(config := replace(config, dtype="float32"))

    @jax.jit
    def expected(weights):
        x, _ = page.hidden_states(*readable(config, weights), tokens[:1])
        logits = page.logits(*readable(config, weights), x)[0]
        return cross_entropy(logits[:-1], tokens[0, 1:]).mean()

    np.testing.assert_allclose(first.loss, expected(weights), rtol=1e-5)
    for _ in range(3):
        state, last = step(state, tokens)
    assert last.loss < first.loss - 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt3"}, "model_type is 'gpt3', known are llama"),
        ({"hidden_sze": 4}, "hidden_sze is 4, which .* the nearest one is hidden_size"),
        ({"initializer_range": -1}, "initializer_range must be positive, got -1"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', expected an integer"),
    ],
    ids=str,
)
def test_a_wrong_key_is_named(change, message):
    with pytest.raises((ValueError, SafetensorsError), match=f"^model: .*{message}"):
        new_model(keys_of("llama") | change, 0)
