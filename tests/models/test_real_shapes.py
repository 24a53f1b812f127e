"""Models in the sizes of real ones, traced, and config.json of older versions.

Nothing is computed: weights and caches are shapes. The tiny models of the other tests
have no head count, vocabulary or rotation of a model that anyone runs, and their
config.json is of one version of transformers. Mixtures have their first layers alone:
each has hundreds of tensors.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkern.formats.architecture_keys import architecture_keys
from jaxkern.formats.gguf import GGUFTensorInfo
from jaxkern.formats.safetensors import SafetensorsFolder, read_safetensors_folder
from jaxkern.models.architecture import page_of
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.hugging_face import HARMLESS, WITHOUT
from jaxkern.models.image_prompts import batch_of, reads_images, with_images
from jaxkern.models.registry import BY_MODEL_TYPE
from jaxkern.models.weight_reader import WeightReader

CONFIGS = json.loads((Path(__file__).parent / "real_configs.json").read_text())
READ = (  # in `make test` no more than that: their blocks are those of others
    *("GLM-4.5-Air", "MiniMax-M2", "Nemotron-3-Nano-30B-A3B", "Falcon-H1-0.5B"),
    "ERNIE-4.5-21B-A3B",
)


class Shapes(SafetensorsFolder):
    """A folder whose tensors are zeros: under `eval_shape` nothing at all."""

    def load(self, name, *, device=None):
        return jnp.zeros(self.tensors[name].shape)


def described(name, folder):
    """The entry, the config, and every tensor of all layers."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    many = {f"t{i}": np.zeros(1, np.float32) for i in range(99)}  # one a layer or more
    save_file(many, folder / "model.safetensors")
    empty = read_safetensors_folder(folder)
    entry = BY_MODEL_TYPE[empty.architecture]
    known = {**HARMLESS, **entry.harmless}, {**WITHOUT, **entry.without}
    assert entry.from_folder is not None
    with architecture_keys(empty, *known) as keys:
        return entry, *entry.from_folder(keys)


def weight_shapes(name, folder):
    """Config, and the shapes of the weights of all layers."""
    entry, config, tensors = described(name, folder)
    infos = {
        name: GGUFTensorInfo(tensor.shape, "F32", 0, 0)
        for name, tensor in tensors.items()
        if tensor.needed and tensor.used
    }
    file = Shapes("shapes", {}, infos, {})
    reader = WeightReader(file, {n: i.shape for n, i in infos.items()}, "f32")
    return config, jax.eval_shape(lambda: entry.weights(config, reader))


@pytest.mark.parametrize("name", READ)
def test_is_read(name, tmp_path):
    """Keys as published: none is unknown, and the sizes fit each other."""
    _, config, tensors = described(name, tmp_path)
    said = CONFIGS[name]
    assert config.layers == said["num_hidden_layers"]
    table = tensors["token_embd.weight"]
    assert table.shape == (said["vocab_size"], said["hidden_size"])
    assert tensors["output.weight"].needed != said["tie_word_embeddings"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in READ else [])
        for name in CONFIGS
    ],
)
def test_traces(name, tmp_path):
    config, weights = weight_shapes(name, tmp_path)
    said = CONFIGS[name]
    sizes = SimpleNamespace(**{**said, **said.get("text_config", {})})
    assert weights.embedding.shape == (sizes.vocab_size, sizes.hidden_size)
    assert len(weights.layers) == sizes.num_hidden_layers == config.layers
    page = page_of(config)
    cache = jax.eval_shape(lambda: page.empty_cache(config, 2, 64))
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    logits, after = jax.eval_shape(
        functools.partial(prefill, config), weights, ints((2, 16)), ints((2,)), cache
    )
    assert logits.shape == (2, sizes.vocab_size)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    logits, _ = jax.eval_shape(
        functools.partial(decode, config), weights, ints((2,)), after
    )
    assert logits.dtype == jnp.float32
    x, none = jax.eval_shape(
        functools.partial(page.hidden_states, config), weights, ints((2, 16))
    )
    assert x.shape == (2, 16, sizes.hidden_size) and none is None
    if reads_images(config):
        nothing = [with_images(config, [], [])] * 2
        images = jax.eval_shape(lambda: batch_of(config, nothing, 16, 1024))
        y, _ = jax.eval_shape(
            functools.partial(page.hidden_states, config),
            *(weights, ints((2, 16)), None, None, None, images),
        )
        assert y.shape == x.shape
