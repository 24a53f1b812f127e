"""Qwen3-VL from a GGUF file of text and one of its tower, against `transformers`."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import InterleavedTensor
from jaxkern.models import load
from jaxkern.models.command_line import main
from jaxkern.models.feed_forward import MixtureWeights
from jaxkern.models.image_prompts import batch_of, with_images
from jaxkern.models.loader import open_model
from jaxkern.models.quantize_file import quantize_file
from jaxkern.models.qwen3_vl import hidden_states, logits
from jaxkern.models.registry import config_of
from jaxkern.models.vision_tower import image_features
from tests.models.test_gguf_hybrids import forward, write
from tests.models.test_images import BOTH, DENSE, GOLDEN, golden, shown
from tests.models.test_images import loaded as loaded_folder
from tests.models.tower_gguf import KINDS, TOWER, tower_tensors, write_both


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text and tower by the name of the golden folder."""
    folder = tmp_path_factory.mktemp("files")
    return {name: write_both(folder, name) for name in KINDS}


@pytest.fixture(scope="module")
def loaded(files):
    """Config and weights by the name of the golden folder."""

    @functools.cache
    def read(name):
        text, tower = files[name]
        return load(text, "f32", tower=tower)

    return read


def same(weights, others):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, weights, others)))


def in_one(weights):
    """Gate and up of experts in one array, as a folder has them."""
    layers = []
    for layer in weights.layers:
        block = layer.feed_forward
        if isinstance(block, MixtureWeights):
            gate, up = block.gate, block.up
            assert isinstance(gate, jax.Array) and isinstance(up, jax.Array)
            both = jnp.concatenate([gate, up], axis=1)
            layer = layer._replace(feed_forward=block._replace(gate=both, up=None))
        layers.append(layer)
    return weights._replace(layers=tuple(layers))


@pytest.mark.parametrize("name", KINDS)
def test_both_files_are_the_folder(loaded, name):
    """The weights bit by bit; numbers of keys are float32."""
    (config, weights), (truth, expected) = loaded(name), loaded_folder(name)
    assert same(in_one(weights), expected)
    rule = replace(config.image_rule, mean=(0.5, 0.4, 0.3), deviation=(0.5, 0.6, 0.7))
    np.testing.assert_array_equal(config.image_rule.mean, np.float32(rule.mean))
    np.testing.assert_array_equal(
        config.image_rule.deviation, np.float32(rule.deviation)
    )
    assert config.eps == np.float32(truth.eps)
    rounded = {"architecture": KINDS[name], "eps": truth.eps, "image_rule": rule}
    assert replace(config, **rounded) == replace(truth, architecture=KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_features_and_logits(loaded, name):
    (config, weights), said = loaded(name), golden(name)
    text = with_images(config, said["prompt"].tolist(), shown(name))
    images = batch_of(config, [text], len(text.tokens), text.patches)

    @jax.jit
    def computed(weights, images):
        features = image_features(config.vision, config, weights.vision, images.seen)
        images = images._replace(seen=features)
        tokens = jnp.array([text.tokens])
        x, _ = hidden_states(config, weights, tokens, images=images)
        return features, logits(config, weights, x)

    features, found = computed(weights, images)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    close(features.rows[0], said["features"])
    for level, truth in zip(features.deep, said["deep"], strict=True):
        close(level[0], truth)
    close(found[0], said["logits"])


@pytest.mark.parametrize("name", BOTH)
def test_greedy_answers_of_the_command_line(name, files, tmp_path, capsys, monkeypatch):
    """The file's template writes the golden prompt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, tower = files[name]
    arguments = ["generate", "--model", str(text), "--tower", str(tower), "--json"]
    arguments += ["--weights", "f32", "--max-tokens", "32", "--prompt", "a"]
    for i, image in enumerate(shown(name)):
        image.save(tmp_path / f"{i}.png")
        arguments += ["--image", str(tmp_path / f"{i}.png")]
    assert main(arguments) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["token_ids"] == golden(name)["greedy"].tolist()


def test_files_in_parts(loaded, tmp_path):
    """Of the text and of the tower; any part stands for all."""
    write_both(tmp_path, DENSE, in_parts_of=20)
    text, tower = (sorted(tmp_path.glob(f"{stem}*")) for stem in ("qwen", "mmproj"))
    assert min(len(text), len(tower)) > 1
    assert same(load(text[0], "f32", tower=tower[-1])[1], loaded(DENSE)[1])
    file = open_model(text[0], tower[0])
    assert file.nbytes == sum(path.stat().st_size for path in (*text, *tower))


def test_blocks_of_the_text_stay_packed(files, loaded, tmp_path):
    """Beside a tower of floats."""
    text, tower = files[DENSE]
    quantize_file(text, tmp_path / "q8.gguf", "Q8_0")
    _, weights = load(tmp_path / "q8.gguf", "packed", tower=tower)
    assert isinstance(weights.layers[0].mixer.qkv[0], InterleavedTensor)
    assert same(weights.vision, loaded(DENSE)[1].vision)


def test_text_alone(files):
    """Without its tower a file reads text, and says so of images."""
    config, weights = load(files[DENSE][0], "f32")
    said = np.load(GOLDEN / DENSE / "golden.npz")
    logits = forward(config, weights, said["tokens"][:16])
    np.testing.assert_allclose(logits, said["logits"][:16], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"text alone.* of GGUF files with its tower"):
        with_images(config, [92], shown(DENSE)[:1])


def test_bounds_of_the_published_folders(files, tmp_path):
    """Where the tower names none, as converters leave them out."""
    keys = {key: value for key, value in TOWER.items() if "pixels" not in key}
    path = write(tmp_path / "t.gguf", "clip", keys, tower_tensors(GOLDEN / DENSE))
    rule = config_of(open_model(files[DENSE][0], path)).image_rule
    assert (rule.least, rule.most) == (2**16, 2**24)
