"""No key of a model is overlooked: it is used, known to be harmless, or refused.

Every other test writes keys that the loader reads, so none of them could see one that
it does not. Here each key that the `gguf` package can write is put into a file.
"""

import dataclasses

import gguf
import numpy as np
import pytest

from jaxkern.formats.architecture_keys import HARMLESS, WITHOUT, architecture_keys
from jaxkern.formats.gguf import GGUFError, read_gguf
from jaxkern.models.registry import config_of
from tests.models.tiny_gguf import write_tiny_gguf

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
VALUES = [3, 0.37, True, False, "foreign", np.arange(1, 4, dtype=np.int32), ["a", "b"]]


def known_keys():
    """All `<architecture>.*` keys of the `gguf` package, and one of nobody."""
    found = {"of_nobody"}
    for group in vars(gguf.Keys).values():
        for value in vars(group).values() if isinstance(group, type) else ():
            if isinstance(value, str) and value.startswith("{arch}."):
                found.add(value.removeprefix("{arch}."))
    return sorted(found)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return read_gguf(write_tiny_gguf(path, request.param, keys=YARN))


def changed(file, key, value):
    """The file with another value for a key of its architecture, or without it."""
    metadata = dict(file.metadata)
    metadata.pop(f"{file.architecture}.{key}", None)
    if value is not None:
        metadata[f"{file.architecture}.{key}"] = value
    return dataclasses.replace(file, metadata=metadata)


def test_the_package_has_many_keys():
    keys = known_keys()
    assert len(keys) > 80
    assert {"logit_scale", "attention.scale", "rope.scaling.yarn_beta_fast"} <= {*keys}


def test_every_key_is_used_harmless_or_refused(file):
    check_every_key(file)


def check_every_key(file, but=()):
    plain = config_of(file)
    for key in known_keys():
        if key.startswith(but):
            continue
        for value in VALUES:
            if any(type(value) is type(w) and value == w for w in WITHOUT.get(key, ())):
                continue
            try:
                config = config_of(changed(file, key, value))
            except GGUFError as error:
                assert str(error).startswith(f"{file.path}: "), key
                assert str(error).count("\n") == 0
            else:
                of_the_file = f"{file.architecture}.{key}" in file.metadata
                same = of_the_file and np.array_equal(
                    file.metadata[f"{file.architecture}.{key}"], value
                )
                assert config != plain or key in HARMLESS or same, (key, value)


@pytest.mark.parametrize(
    "key",
    [
        "logit_scale",
        "embedding_scale",
        "residual_scale",
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "attention.sliding_window_pattern",
        "attention.temperature_scale",
        "rope.scaling.alpha",
        "of_nobody",
    ],
)
def test_an_unknown_key_is_refused_by_name(file, key):
    name = rf"key {file.architecture}\.{key.replace('.', chr(92) + '.')} is 0\.37"
    with pytest.raises(GGUFError, match=name):
        config_of(changed(file, key, 0.37))


@pytest.mark.parametrize(("key", "values"), WITHOUT.items())
def test_what_says_without_is_accepted(file, key, values):
    for value in values:
        assert config_of(changed(file, key, value)) == config_of(file)


@pytest.mark.parametrize(("key", "value"), [(k, 3) for k in HARMLESS])
def test_harmless(file, key, value):
    assert config_of(changed(file, key, value)) == config_of(file)


def test_keys_of_another_architecture_are_not_ours(file):
    metadata = {**file.metadata, "gpt2.logit_scale": 0.5, "general.note": "llama.x"}
    other = dataclasses.replace(file, metadata=metadata)
    assert config_of(other) == config_of(file)


@pytest.mark.parametrize("key", ["attention.head_count_kv", "feed_forward_length"])
def test_one_number_for_each_layer(file, key):
    """Newer converters write an array where layers could differ."""
    plain = config_of(file)
    value = file.metadata[f"{file.architecture}.{key}"]
    each = np.array([value, value], np.int32)
    assert config_of(changed(file, key, each)) == plain
    with pytest.raises(GGUFError, match=rf"{key}.*(same in every layer|rows)"):
        config_of(changed(file, key, np.array([value, 1], np.int32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "known are none, linear and yarn"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "known are 0 .* and negative"),
        ({"rope.scaling.yarn_attn_factor": 1.3}, "expected 1 or the usual 1.1386"),
        ({"rope.scaling.yarn_beta_fast": 0.5}, "YaRN from 1.0 to 0.5 turns"),
        ({"rope.freq_base": 1.0}, "a base above 1"),
        ({"rope.scale_linear": 2.0}, "but rope.scaling.factor is 4.0"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.5},
            "built here with YaRN alone",
        ),
        ({"embedding_length": 65}, "have 64 elements"),
    ],
)
def test_what_contradicts_itself_is_refused(file, change, message):
    for key, value in change.items():
        file = changed(file, key, value)
    with pytest.raises(GGUFError, match=message):
        config_of(file)


def test_the_usual_factor_of_yarn_is_accepted(file):
    """Converters write it though it says nothing new: 0.1 ln(4) + 1."""
    usual = changed(file, "rope.scaling.yarn_attn_factor", 1.1386294)
    assert config_of(usual) == config_of(file)


def test_a_new_architecture_gets_the_check(file):
    """Whoever reads keys reads all of them, or the file is refused."""
    metadata = {"general.architecture": "new", "new.layers": 2, "new.gain": 0.5}
    new = dataclasses.replace(file, metadata=metadata)
    with pytest.raises(GGUFError, match=r"key new\.gain is 0\.5, which the model"):
        with architecture_keys(new) as keys:
            assert keys.integer("layers") == 2
    with architecture_keys(new) as keys:
        assert (keys.integer("layers"), keys.number("gain")) == (2, 0.5)
