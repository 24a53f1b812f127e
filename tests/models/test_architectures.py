"""Every architecture of the registry against `transformers`, in all it can do.

The list of folders is that of the registry: an architecture without one turns this red.
The tests of llama files, which were all there was, compare full forward passes with
float64; nothing compared gradients, or answers, with another program.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import LongRopeScaling, YarnScaling, cross_entropy
from jaxkern.formats.gguf import read_gguf
from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.models.cached_steps import prefill
from jaxkern.models.generate import generate
from jaxkern.models.hugging_face import HARMLESS, WITHOUT
from jaxkern.models.loader import load_file
from jaxkern.models.registry import ARCHITECTURES, BY_MODEL_TYPE, config_of, described
from tests.models.folder_gguf import NAMES, write_gguf_of
from tests.models.test_architecture_keys import check_every_key

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    path.parent.name: path.parent for path in GOLDEN.glob("transformers_*/*/golden.npz")
}
SAID_BY = {  # keys of older files, and those that say more, layer by layer
    "_sliding_window_pattern": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
}
OF_THESE = (  # where there are 0 of the first, the second says nothing
    ("num_kv_shared_layers", "use_double_wide_mlp"),
    ("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
SEEING = ("qwen3_vl", "qwen3_vl_moe")  # test_images reads their text too
OF_THESE += tuple(tuple(f"text_config.{key}" for key in pair) for pair in OF_THESE)
# What `make test` leaves to the full run: other names for what a folder here computes.
REPEATS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe", "mistral3")
REPEATS += ("gemma4_keys_as_values",)  # so are those of gemma4_experts
REPEATS += ("gemma4_images",)
REPEATS += ("nemotron_h_latent", "falcon_h1_norm")
# Their blocks are those of others; logits of GGUF files of most are in `make test`.
LIKE_OTHERS = ("glm4_moe", "minimax_m2", "olmoe", "granite", "granitemoe", "seed_oss")
LIKE_OTHERS += ("ernie4_5", "ernie4_5_moe", "falcon_h1")
IN_PIECES = ("nemotron_h",)  # test_decoder has its blocks, in pieces and token by token


def models(*but):
    """All of them; those names are left to the full run."""
    left = (*REPEATS, *SEEING, *LIKE_OTHERS, *but)
    return [
        pytest.param(name, marks=[pytest.mark.full] if name in left else [])
        for name in sorted(FOLDERS)
    ]


PROMPT, SHORTER = 9, 5
LENGTHS = np.array([40, 23, 7], np.int32)


def model_type(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


def test_every_architecture_has_a_folder():
    found = {model_type(folder) for folder in FOLDERS.values()}
    assert found >= {a.model_type for a in ARCHITECTURES if a.model_type}
    assert all(a.model_type for a in ARCHITECTURES), "an architecture of GGUF alone"


@functools.cache
def loaded(name):
    """Config and weights in float32, the golden arrays."""
    return *load(FOLDERS[name], "f32"), dict(np.load(FOLDERS[name] / "golden.npz"))


@pytest.mark.parametrize("name", models())
def test_training(name):
    """Logits and a gradient of the forward pass without a cache."""
    config, weights, golden = loaded(name)
    page, tokens = page_of(config), jnp.array(golden["tokens"])[None]
    # the table is as in the file, where bfloat16 would round its gradient
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)

    def loss(weights):
        x, cache = page.hidden_states(config, weights, tokens)
        assert cache is None
        y = page.logits(config, weights, x)
        losses = cross_entropy(y[0, :-1], tokens[0, 1:])
        assert isinstance(losses, jax.Array)  # no lse was asked for
        return losses.mean(), y[0]

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(weights)
    assert np.std(golden["logits"]) > 0.3  # random weights still say something
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
    truth = golden["embedding_grad"]
    assert np.abs(truth).max() > 1e-2
    np.testing.assert_allclose(
        embedding_grad(FOLDERS[name], grads), truth, rtol=0, atol=1e-4
    )


def embedding_grad(folder, grads):
    """Of the table; if it is the output too, of both together."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", {}) | config  # what stands outside decides
    if not config.get("tie_word_embeddings"):
        return grads.embedding
    (output,) = grads.output
    return grads.embedding + (output.T if config["vocab_size"] > 32 else output)


@pytest.mark.parametrize("name", models(*IN_PIECES))
def test_ragged_prompts(name):
    """What a row says does not depend on the others, nor on what stands behind it."""
    config, weights, golden = loaded(name)
    rows = np.stack([golden["tokens"]] * len(LENGTHS))
    for row, n in zip(rows, LENGTHS, strict=True):
        row[n:] = 1
    cache = page_of(config).empty_cache(config, len(rows), 48)
    read = jax.jit(prefill, static_argnums=0)
    logits, after = read(config, weights, rows, LENGTHS, cache)
    np.testing.assert_allclose(logits, golden["logits"][LENGTHS - 1], rtol=0, atol=1e-4)
    assert all((np.asarray(own.lengths) == LENGTHS).all() for own in after)
    # the rest of each text: 0 tokens of the first row, which stays as it is
    for row, n in zip(rows, LENGTHS, strict=True):
        row[:] = np.pad(golden["tokens"][n:], (0, n), constant_values=2)
    logits, end = read(config, weights, rows, 40 - LENGTHS, after)
    whole = np.broadcast_to(golden["logits"][39], logits[1:].shape)
    np.testing.assert_allclose(logits[1:], whole, rtol=0, atol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), after, end)


@pytest.mark.parametrize("name", models(*IN_PIECES))
def test_greedy_answers(name):
    """32 tokens by cached decode, beside a shorter prompt and one that ends at once."""
    config, weights, golden = loaded(name)
    prompt = golden["tokens"][:PROMPT].tolist()
    answers = generate(
        config, weights, [prompt[:SHORTER], prompt], max_tokens=32, chunk=31
    )
    assert answers[1] == golden["greedy"].tolist()


IN_GGUF = [  # folders of architectures that GGUF files have too
    name
    for name in sorted(FOLDERS)
    if BY_MODEL_TYPE[model_type(FOLDERS[name])].name in NAMES
]


@functools.cache
def gguf_of(name, folder):
    return read_gguf(write_gguf_of(FOLDERS[name], folder / f"{name}.gguf"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_is_the_same_model(name, folder):
    """The config, and weights but for the order of rows that rotate in pairs.

    SmolLM3's step between layers that do not rotate is in no key: here it is another.
    """
    config, _, golden = loaded(name)
    file = gguf_of(name, folder)
    ours, found = load_file(file, "f32")
    ours = dataclasses.replace(ours, rotated=config.rotated)
    cache = page_of(ours).empty_cache(ours, 1, 40)
    tokens = golden["tokens"][None]
    logits, _ = jax.jit(prefill, static_argnums=0)(
        ours, found, tokens, np.array([40], np.int32), cache
    )
    np.testing.assert_allclose(logits[0], golden["logits"][39], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "olmo2"])
def test_packed_weights_are_those_of_the_file(name, folder):
    """Blocks of 8 bits, kept or decoded: the same logits."""
    path = folder / f"{name}-q8.gguf"
    file = read_gguf(write_gguf_of(FOLDERS[name], path, quantized=True))
    tokens = loaded(name)[2]["tokens"][None, :9]
    logits = []
    for policy in ("f32", "packed"):
        config, weights = load_file(file, policy)
        page = page_of(config)
        x, _ = page.hidden_states(config, weights, tokens)
        logits.append(page.logits(config, weights, x))
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", IN_GGUF)
def test_every_key_of_a_gguf_file_is_used_harmless_or_refused(name, folder):
    file = gguf_of(name, folder)
    scaled = isinstance(config_of(file).scaling, YarnScaling | LongRopeScaling)
    # else some say how to scale what is not; test_architecture_keys has YARN
    check_every_key(file, but=() if scaled else ("rope.scaling.",))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_every_key_of_a_folder_is_used_harmless_or_refused(name):
    """Nested ones too, each with a foreign value; strangers among them."""
    plain = read_safetensors_folder(FOLDERS[name])
    kind = plain.architecture
    said = plain.metadata
    unsaid = {f"{kind}.{b}" for a, b in OF_THESE if said.get(f"{kind}.{a}") == 0}
    metadata = {key: v for key, v in said.items() if key not in unsaid}
    plain = dataclasses.replace(plain, metadata=metadata)
    harmless = {*HARMLESS, *BY_MODEL_TYPE[kind].harmless}
    harmless |= {a for a, b in SAID_BY.items() if f"{kind}.{b}" in plain.metadata}
    without = {**WITHOUT, **BY_MODEL_TYPE[kind].without}
    before = what_is_computed(plain)
    keys = [key.partition(".")[2] for key in plain.metadata if key.startswith(kind)]
    for key in (*keys, "of_nobody", "rope_parameters.of_nobody"):
        for value in (3, 0.8, True, False, "foreign", ["a"], [0.5]):
            full = f"{kind}.{key}"
            if any(type(value) is type(w) and value == w for w in without.get(key, ())):
                continue
            file = dataclasses.replace(plain, metadata={**plain.metadata, full: value})
            try:
                after = what_is_computed(file)
            except SafetensorsError as error:
                assert str(error).startswith(f"{FOLDERS[name]}: ")
            else:
                same = plain.metadata.get(full, False) == value
                known = {key, f"{key.partition('.')[0]}.*"} & harmless
                assert after != before or known or same, (key, value)


@pytest.mark.parametrize("share", [-1.0, 0.01, 33.0, 2.0**40])
def test_heads_that_cannot_rotate_so_are_refused(share):
    """Tables of so many pairs were made before anything was compared."""
    for name, kind in (("phi3_longrope", ""), ("gemma4", "full_attention.")):
        plain = read_safetensors_folder(FOLDERS[name])
        end = f"rope_parameters.{kind}partial_rotary_factor"
        [key] = (key for key in plain.metadata if key.endswith(end))
        file = dataclasses.replace(plain, metadata={**plain.metadata, key: share})
        if kind and share == 0.01:  # no pair rotates
            assert described(file).config.far.rotated_pairs == 0
            continue
        with pytest.raises(SafetensorsError, match=r"partial_rotary_factor"):
            described(file)


def what_is_computed(file):
    model = described(file)
    return model.config, sorted(model.file.tensors)


def test_model_types_of_folders_are_known():
    assert {model_type(folder) for folder in FOLDERS.values()} <= {*BY_MODEL_TYPE}
