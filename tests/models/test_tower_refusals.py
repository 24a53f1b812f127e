"""Towers in files of their own that are not understood, damaged, or another model's."""

import re
from dataclasses import replace

import gguf
import numpy as np
import pytest

from jaxkern.formats.gguf import GGUFError, read_gguf
from jaxkern.models import load
from jaxkern.models.command_line import main
from jaxkern.models.loader import load_file, open_model
from jaxkern.models.qwen3_vl_gguf import WITHOUT
from jaxkern.models.registry import config_of
from tests.models.test_architecture_keys import VALUES, check_every_key
from tests.models.test_images import DENSE, GOLDEN
from tests.models.tiny_gguf import write_tiny_gguf
from tests.models.tower_gguf import TOKENS, write_both

FOREIGN = "which the model of architecture clip"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_both(tmp_path_factory.mktemp("files"), DENSE)


@pytest.fixture(scope="module")
def opened(files):
    return open_model(*files)


def without(mapping, key):
    return {name: value for name, value in mapping.items() if name != key}


def changed(file, key, value):
    """The file with another value for a key, or without it."""
    metadata = without(file.metadata, key)
    return replace(file, metadata=metadata | ({} if value is None else {key: value}))


def numbers(*values):
    return np.array(values)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("projector_type", "qwen2vl_merger", "qwen3vl has 'qwen3vl_merger'"),
        ("projector_type", None, "qwen3vl has 'qwen3vl_merger'"),
        ("has_vision_encoder", False, "expected true"),
        ("has_audio_encoder", True, FOREIGN),
        ("use_gelu", None, "use_gelu is None, expected true"),
        ("use_silu", True, FOREIGN),
        ("vision.projection_dim", 24, "the text has 32"),
        ("vision.image_size", 22, "a multiple of patches of 4"),
        ("vision.image_size", 16, r"tensor v.position_embd.weight is \(25, 24\)"),
        ("vision.patch_size", 5, r"tensor v.patch_embd.weight is \(24, 3, 4, 4\)"),
        ("vision.patch_size", 0, "expected 1 or more"),
        ("vision.block_count", 2**30, "the file has [0-9]+ tensors"),
        ("vision.block_count", 2, "expected true or false for each of 2 blocks"),
        ("vision.attention.head_count", 4, "24 dims are no multiple of 4"),
        ("vision.attention.layer_norm_epsilon", 1e-5, "of this tower have 1e-06"),
        ("vision.spatial_merge_size", 3, r"tensor mm.0.weight is \(96, 96\)"),
        ("vision.spatial_merge_size", 2**30, "tensor mm.0.weight is"),
        ("vision.is_deepstack_layers", None, "for each of 3 blocks"),
        ("vision.is_deepstack_layers", numbers(0, 1), "a list of true or false"),
        ("vision.is_deepstack_layers", numbers(False, True, True), "v.deepstack.1"),
        ("vision.image_mean", numbers(0.5), "expected three numbers"),
        ("vision.image_std", numbers(0.5, 0.0, 0.5), "three positive numbers"),
        ("vision.image_min_pixels", 2048, "image_max_pixels is 1024"),
        ("vision.n_wa_pattern", 8, FOREIGN),
        ("vision.embedding_length", "x", "expected an integer"),
    ],
)
def test_keys_of_another_tower(opened, key, value, message):
    other = changed(opened.tower, f"clip.{key}", value)
    refused(replace(opened, tower=other), message, of=other)


def refused(file, message, *, of):
    """In words that begin with the name of one of both files."""
    with pytest.raises(GGUFError, match=message) as error:
        config_of(file)
    assert str(error.value).startswith(f"{of.path}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen3vl.n_deepstack_layers", 1, "the tower .* has 2"),
        ("qwen3vl.n_deepstack_layers", None, "the tower .* has 2"),
        ("qwen3vl.n_deepstack_layers", 4, "there are 3 layers"),
        ("qwen3vl.rope.dimension_sections", None, "three numbers of pairs, and 0"),
        ("qwen3vl.rope.dimension_sections", numbers(4, 2, 2), "three numbers of pair"),
        ("qwen3vl.rope.dimension_sections", numbers(4, 2, 1, 0), "8 pairs in all"),
        ("qwen3vl.rope.dimension_sections", numbers(4, 2, 0, 2), "three numbers of"),
        ("tokenizer.ggml.tokens", TOKENS[:92], r"has not one <\|image_pad\|>"),
        ("tokenizer.ggml.tokens", TOKENS[:93], r"has not one <\|video_pad\|>"),
        ("tokenizer.ggml.tokens", None, r"has not one <\|image_pad\|>"),
    ],
)
def test_keys_of_another_text(opened, key, value, message):
    assert key in refused(changed(opened, key, value), message, of=opened)


def test_every_key_of_the_text_is_used_or_refused(opened):
    but = ("n_deepstack_layers", "rope.dimension_sections", "rope.scaling.")
    check_every_key(replace(opened, tower=None), but=but)


def keys_of_towers():
    """All keys `clip.*` of the `gguf` package, and one of nobody."""
    found, groups = {"clip.vision.of_nobody"}, [vars(gguf.Keys)]
    for group in groups:
        groups += [vars(value) for value in group.values() if isinstance(value, type)]
        found |= {key for key in group.values() if str(key).startswith("clip.")}
    return sorted(found)


def test_every_key_of_the_tower_is_used_or_refused(opened):
    plain, tower, keys = config_of(opened), opened.tower, keys_of_towers()
    assert len(keys) > 40
    for key in keys:
        same = [tower.metadata.get(key), *WITHOUT.get(key.removeprefix("clip."), ())]
        for value in VALUES:
            if any(value is other for other in same):
                continue
            try:
                config = config_of(replace(opened, tower=changed(tower, key, value)))
            except GGUFError as error:
                assert str(error).startswith((f"{tower.path}: ", f"{opened.path}: "))
            else:
                assert config != plain, (key, value)


@pytest.mark.parametrize(
    "name", ["v.blk.1.ln1.bias", "v.patch_embd.weight.1", "mm.2.weight"]
)
def test_tensors_of_another_tower(opened, name):
    tower, info = opened.tower, opened.tower.tensors[name]
    others = {
        f"has no tensor {name}": without(tower.tensors, name),
        f"tensor {name} is (7, 2), expected": tower.tensors
        | {name: replace(info, shape=(7, 2))},
        "tensor v.pre_ln.weight has no place": tower.tensors
        | {"v.pre_ln.weight": info},
    }
    for message, tensors in others.items():
        other = replace(tower, tensors=tensors)
        refused(replace(opened, tower=other), re.escape(message), of=tower)


@pytest.mark.parametrize("qtype", ["I32", "F64"])
def test_a_tensor_of_other_numbers(opened, qtype):
    name = "v.blk.1.ln1.bias"
    info = replace(opened.tower.tensors[name], qtype=qtype)
    tower = replace(opened.tower, tensors=opened.tower.tensors | {name: info})
    with pytest.raises(
        GGUFError, match=rf"tensor {name} (is|has type) {qtype}"
    ) as error:
        load_file(replace(opened, tower=tower), "f32")
    assert str(error.value).startswith(f"{tower.path}: ")


def test_damaged_towers(files, tmp_path):
    """What the reader refuses says which of both files it is."""
    text, tower = files
    whole = tower.read_bytes()
    for end in (0, 3, 40, len(whole) // 2, len(whole) - 100):
        path = tmp_path / f"{end}.gguf"
        path.write_bytes(whole[:end])
        with pytest.raises(GGUFError) as error:
            open_model(text, path)
        assert str(error.value).startswith(f"{path}: ")
    with pytest.raises(FileNotFoundError):
        open_model(text, tmp_path / "none.gguf")


def test_where_a_tower_has_no_place(files, tmp_path):
    text, tower = files
    with pytest.raises(ValueError, match="is a folder, which has the tower"):
        load(GOLDEN / DENSE, tower=tower)
    llama = write_tiny_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(GGUFError, match="'llama', which reads no images: load it wit"):
        load(llama, tower=tower)
    with pytest.raises(GGUFError, match="'clip', known are"):
        load(tower)
    with pytest.raises(GGUFError, match=r"has tensor .*, and so has"):
        read_gguf(text).joined(read_gguf(text))


@pytest.mark.parametrize("command", ["generate --prompt a --model", "chat", "plan"])
def test_commands_take_a_tower(command, files, capsys):
    text, _ = files
    assert main([*command.split(), str(text), "--tower", str(text)]) == 2
    said = capsys.readouterr().err
    assert f"{text}: general.architecture is 'qwen3vl', expected 'clip'" in said
