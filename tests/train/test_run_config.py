"""The file of a run: every key known, of its type and in its range."""

import math

import pytest

from jaxkern.train.run_config import (
    Lora,
    RunConfig,
    differing_key,
    known_keys,
    read_toml,
    run_config,
    with_settings,
)

LEAST = {"model": {"path": "m"}, "data": {"files": "a.txt"}, "out": "run"}


def test_what_is_not_said_has_its_default():
    found = run_config(LEAST, "c.toml")
    expected = RunConfig(model={"path": "m"}, out="run", data=found.data)
    assert found == expected and found.data.files == ("a.txt",)
    found = run_config({**LEAST, "lora": {"rank": 2, "alpha": 4}}, "c.toml")
    assert found.lora == Lora(rank=2, alpha=4.0)
    assert "data.rows" in known_keys() and "lora.rank" in known_keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"file": "a"}}, "unknown key data.file; the nearest one is data.fil"),
        ({"rows": 4}, "unknown key rows; the nearest one is data.rows"),
        ({"step": 4}, "unknown key step; the nearest one is steps"),
        ({"optimiser": {}}, "unknown key optimiser; the nearest one is optimizer"),
        ({"steps": 0}, "steps must be 1 to 2147483647, got 0"),
        ({"steps": True}, "steps must be an integer, got True"),
        ({"steps": 1.5}, "steps must be an integer, got 1.5"),
        ({"data": {"files": "a", "rows": "8"}}, "data.rows must be an integer"),
        ({"data": {"files": [1]}}, r"data.files must be a list of texts, got \[1\]"),
        ({"data": 3}, "data must be a section, got 3"),
        ({"data": {}}, "has no data. Give data.files"),
        ({"out": ""}, "has no out"),
        ({"remat": "some"}, "remat must be one of none, attention, products, full"),
        ({"optimizer": {"final": 2}}, "optimizer.final must be 0 to 1, got 2.0"),
        ({"optimizer": {"rate": math.inf}}, "optimizer.rate must be finite, got inf"),
        ({"optimizer": {"rate": 10**400}}, "optimizer.rate must be finite, got inf"),
        ({"lora": {"alpha": math.nan}}, "lora.alpha must be finite, got nan"),
        ({"accumulate": 3}, "data.rows must divide into accumulate = 3 parts, got 8"),
        ({"model": {"path": "m", "vocab_size": 3}}, "model has path and vocab_size"),
        ({"model": {}}, "has no model"),
        ({"lora": {"targets": 1}}, "lora.targets must be a list of texts"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_a_wrong_key_or_value_is_named(change, message):
    with pytest.raises(ValueError, match=f"^c.toml: {message}"):
        run_config(LEAST | change, "c.toml")


def test_settings_of_the_command_line_come_first(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("steps = 3\n[data]\nrows = 4\n")
    tables = with_settings(
        read_toml(path), ["data.rows=6", "out=here", "model.path='x'", "steps=7"]
    )
    expected = {"steps": 7, "data": {"rows": 6}, "out": "here", "model": {"path": "x"}}
    assert tables == expected
    for wrong in ("steps", "=3"):
        with pytest.raises(ValueError, match="--set: expected KEY=VALUE"):
            with_settings({}, [wrong])
    with pytest.raises(ValueError, match=r"--set: steps of steps\.x is no section"):
        with_settings({"steps": 1}, ["steps.x=1"])
    path.write_text("steps = ")
    with pytest.raises(ValueError, match="is no TOML"):
        read_toml(path)


def test_a_key_that_changes_no_number_may_differ():
    a = {"steps": 3, "out": "a", "checkpoints": {"every": 3}, "data": {"rows": 4}}
    assert differing_key(a, a | {"out": "b", "checkpoints": {"every": 1}}) is None
    assert differing_key(a, a | {"data": {"rows": 5}}) == "data.rows"
    assert differing_key(a, a | {"lora": {"rank": 5}}) == "lora.rank"
