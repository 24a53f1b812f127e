"""`jaxkern train` and `jaxkern finetune` as they are typed; a run goes on bit for bit.

The parts of a run had tests each, and a loop around them stood in no file.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

from jaxkern.models import load
from jaxkern.models.command_line import main, packages
from jaxkern.models.loader import open_model
from jaxkern.models.registry import described
from jaxkern.train import packed_rows, trainer
from jaxkern.train.jobs import write_merged
from jaxkern.train.journal import read_lines
from tests.models.folder_gguf import write_gguf_of
from tests.models.test_adapter import SAVED, logits_of
from tests.models.test_architectures import FOLDERS
from tests.models.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "training.md"
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all runs here; executables are kept between them."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(ROOT)  # the files of the example
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


@pytest.fixture(scope="module")
def config(folder):
    """The example of the page."""
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = folder / "config.toml"
    path.write_text(example)
    return str(path)


def settings(out, **more):
    keys = {"out": str(out), "steps": STEPS, "optimizer.warmup": 2, "log_every": 1}
    keys |= {"checkpoints.keep": 2}
    keys |= {"checkpoints.every": 2, "data.files": "docs/training.md"}
    keys |= {"evaluation.files": "docs/training.md", "evaluation.every": 3} | more
    return [word for k, v in keys.items() for word in ("--set", f"{k}={v}")]


def lines_of(out):
    """Without the speeds."""
    lines = read_lines(Path(out) / "steps.jsonl")
    drop = ("tokens_per_second", "mfu")
    return [{k: v for k, v in line.items() if k not in drop} for line in lines]


def state_of(out, step):
    """The arrays of a checkpoint, on whatever devices they were."""
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            Path(out).absolute() / f"checkpoints/{step}/state",
            args=ocp.args.StandardRestore(fallback_sharding=here),
        )


@pytest.fixture(scope="module")
def whole(folder, config):
    """A run that nobody stopped."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        assert main(["train", config, *settings(folder / "whole"), "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder / "whole"


def test_the_example_of_the_page_trains(whole, capsys):
    lines = lines_of(whole)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.2
    assert [line["step"] for line in lines if "evaluation" in line] == [3, 5]
    assert (whole / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert {p.name for p in (whole / "checkpoints").iterdir()} == {"4", "5"}
    prompt = ["--prompt", "The ", "--raw", "--max-tokens", "3", "--json"]
    assert main(["generate", "--model", str(whole / "model"), *prompt]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["prompt_tokens"] == 4


def test_a_run_that_is_stopped_goes_on_bit_for_bit(
    whole, folder, config, capsys, monkeypatch
):
    """By the same command, after a Ctrl-C in its third step."""
    out = folder / "stopped"
    batch = packed_rows.PackedRows.batch

    def interrupted(self, i, rows):
        if i == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, i, rows)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(packed_rows.PackedRows, "batch", interrupted)
        assert main(["train", config, *settings(out)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    said = capsys.readouterr().err
    assert f"stopped after step 3 of 5, with a checkpoint in {out}" in said
    assert (out / "checkpoints" / "3").exists() and not (out / "model").exists()
    with open(out / "steps.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step"')  # of a run that was killed
    assert main(["train", config, *settings(out)]) == 0
    said = capsys.readouterr()
    assert "goes on from the checkpoint of step 3" in said.err
    assert re.search(r"step 5 of 5: loss \d\.\d+, \d+ tokens/s, MFU unknown", said.err)
    assert said.out == f"{out / 'model'}\n"
    assert sorted(map(str, lines_of(out))) == sorted(map(str, lines_of(whole)))
    jax.tree.map(
        np.testing.assert_array_equal, state_of(out, STEPS), state_of(whole, STEPS)
    )
    assert main(["train", config, *settings(out)]) == 0
    assert "all 5 steps were done before" in capsys.readouterr().err


def error_of(arguments, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, (out, err)
    return err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data.length": 32}, "of another run: data.length has another value here"),
        ({"data.documents": "lines"}, "of another run: data.documents has another"),
        ({"data.files": "README.md"}, "of another run: data.files has another value"),
        ({"data.rws": 4}, "unknown key data.rws; the nearest one is data.rows"),
        ({"data.rows": 4}, "a multiple of the 8 devices, got 4 / 1"),
        ({"optimizer.warmup": 5}, "optimizer.warmup must be below steps, got 5 of 5"),
        ({"model.hidden_sze": 4}, "the nearest one is hidden_size"),
        (
            {"data.tokenizer": "model"},
            'data.tokenizer is "model", but the model is new',
        ),
        ({"lora.rank": 4}, "a new model has no weights to adapt"),
        (
            {"evaluation.files": "none.txt"},
            "evaluation.files: there is no file none.txt",
        ),
    ],
    ids=str,
)
def test_what_cannot_go_on_is_said(whole, config, capsys, more, message):
    arguments = ["train", config, *settings(whole, **more), "--quiet"]
    assert message in error_of(arguments, capsys)


def test_texts_that_have_changed_are_refused(
    whole, folder, config, capsys, monkeypatch
):
    text = folder / "text.md"
    text.write_text("other words")
    monkeypatch.setattr(
        trainer, "texts_of", lambda data: iter([text.read_text()])
    )  # under the same name
    arguments = ["train", config, *settings(whole), "--quiet"]
    assert "the texts or their tokens are others" in error_of(arguments, capsys)


def test_a_missing_package_is_said_with_what_installs_it(config, capsys, monkeypatch):
    from jaxkern.train import command

    with monkeypatch.context() as patched:
        patched.setattr(command, "NEEDED", ("optax", "orbax.nothing"))
        said = error_of(["train", config], capsys)
    assert (
        f"orbax.nothing is not installed: {packages.pip_install(packages.TRAIN)}"
        in said
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["train"] == [*packages.TRAIN]
    one = ["train", config, "--processes", "2"]
    assert "--coordinator, --processes and --process go together" in error_of(
        one, capsys
    )


def test_adapters_of_a_quantised_model(folder, capsys):
    """finetune, then generate with what it wrote; the base is packed and stays."""
    model = str(write_tiny_gguf(folder / "m.gguf", "llama"))
    out = folder / "tuned"
    flags = ["--text", "docs/training.md", "--out", str(out), "--steps", "4"]
    flags += ["--rate", "3e-2", "--rank", "2", "--targets", "q_proj,v_proj,down_proj"]
    keys = {"data.length": 16, "data.documents": "lines", "compute_dtype": "float32"}
    keys |= {"devices.layout": "fsdp"}
    flags += [w for k, v in keys.items() for w in ("--set", f"{k}={v}")]
    assert main(["finetune", model, *flags, "--quiet"]) == 0
    losses = [line["loss"] for line in lines_of(out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    said = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert said["r"] == 2 and said["target_modules"] == [
        "down_proj",
        "q_proj",
        "v_proj",
    ]
    ask = ["generate", "--model", model, "--prompt", "the sand", "--json"]
    ask += [
        "--max-tokens",
        "8",
        "--weights",
        "packed",
        "--adapter",
        str(out / "adapter"),
    ]
    assert main(ask) == 0
    (with_it,) = json.loads(capsys.readouterr().out)["answers"]
    assert with_it["token_ids"]
    assert "a model, and the command line another one" in error_of(
        ["finetune", model, config_with(folder, "[model]\npath = 'x'\n"), *flags],
        capsys,
    )
    assert "has no product 'wq'" in error_of(
        ["finetune", model, *flags, "--targets", "wq", "--out", str(folder / "x")],
        capsys,
    )


def test_an_adapter_is_merged_into_a_folder(tmp_path):
    """What `--merge` writes; a GGUF file has no folder's keys."""
    base = FOLDERS["llama"]
    model = described(open_model(base))
    said = write_merged(model, str(base), str(SAVED / "llama"), str(tmp_path), None)
    assert said == str(tmp_path / "model")
    tokens = jax.numpy.arange(9) * 7 % 96
    found = logits_of(*load(said, "f32"), tokens)
    expected = logits_of(*load(base, "f32", adapter=SAVED / "llama"), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    packed = str(write_gguf_of(base, tmp_path / "m.gguf"))
    model = described(open_model(packed))
    said = write_merged(model, packed, str(SAVED / "llama"), str(tmp_path), None)
    assert said.startswith("no model folder: a GGUF file has no config.json")


def config_with(folder, text):
    path = folder / "other.toml"
    path.write_text(text)
    return str(path)


def test_help_and_import_are_light():
    """`import jaxkern` and `jaxkern train --help` ask for none of the packages."""
    code = """
import sys
import jaxkern
from jaxkern.models.command_line import main
try:
    main(["train", "--help"])
except SystemExit as ended:
    assert ended.code == 0
heavy = {"optax", "orbax", "rich", "matplotlib", "grain", "safetensors", "gguf"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr
    for word in ("CONFIG.toml", "--set KEY=VALUE", "--from STEP", "--coordinator"):
        assert word in found.stdout
