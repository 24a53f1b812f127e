"""`jaxkern chat`: in this process with typed lines, and once in a real terminal."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxkern.formats.printable import printable
from jaxkern.models import conversation
from jaxkern.models.command_line import main
from jaxkern.models.conversation import Conversation
from tests.models.tiny_gguf import write_tiny_gguf

FEW = ("--max-tokens", "1")  # comes with the prompt: one executable less


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "m.gguf", "llama"))


@pytest.fixture
def chat(path, monkeypatch, capsys, tmp_path):
    """Runs a chat on some lines: (what it answered, what it said beside)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(conversation, "PIECES", (256,))

    def run(*lines, options=FEW, model=path):
        typed = iter(lines)

        def read(mark=""):
            line = next(typed, None)
            if line is None:
                raise EOFError
            if line is KeyboardInterrupt:
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        assert main(["chat", str(model), "--backend", "xla", *options]) == 0
        return capsys.readouterr()

    return run


def test_turns_commands_and_errors(chat, tmp_path, monkeypatch):
    """One chat through every command: the cache, the history and its file."""
    file, half = tmp_path / "talk.json", tmp_path / "half.json"
    half.write_text(r'{"messages": [{"role": "user", "content": "\ud800"}]}')
    told = []
    plain = Conversation.answer

    def listen(self, ids, **options):
        told.append((len(ids), self.ids == ids[: len(self.ids)] and bool(self.ids)))
        return plain(self, ids, **options)

    monkeypatch.setattr(Conversation, "answer", listen)
    out, err = chat(
        *("the sand", "and the hand \\", "of an elephant", "/stats", f"/save {file}"),
        *("/set temperature 0.7", "/set top_k 5", "/set", "/set heat 3"),
        *("/set temperature 0", "/set top_k none"),
        *("/set seed -1", "/set temperature warm", "/nope", "/load", "/help"),
        *(KeyboardInterrupt, "/clear", "   ", "the end", f"/save {file}"),
        *(f"/load {half}", f"/load {file}", f"/save {__file__}"),
        *("/system Be brief.", "/quit", "never"),
    )
    assert [goes_on for _, goes_on in told] == [False, True, False]
    assert told[1][0] > told[0][0] > told[2][0] - 10
    for said in (
        "[read ",
        "tokens of the latest text were in the cache",
        f"(4 messages in {file})",
        "(temperature 0.7)\n(top-k 5)\ntemperature 0.7\ntop-k 5\n",
        "jaxkern: /set: no 'heat', but temperature, top-k",
        "jaxkern: /set seed: expected 0 to 2147483647, got '-1'.",
        "jaxkern: --temperature must be a number, got 'warm'.",
        "jaxkern: no command /nope, but /help, /clear",
        "jaxkern: /load: give the name of a file.",
        "/quit : ends, as Ctrl-D does",
        "(/quit or Ctrl-D ends)",
        "(forgotten)",
        f"(2 messages in {file})",
        "(2 messages)",
        f'jaxkern: /load: {half} has no "messages" of a role',
        f"jaxkern: /save: {__file__} is there already.",
        "(system message set)",
    ):
        assert said in err
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "the end"
    assert printable(messages[1]["content"]) in out and "[read" not in out
    assert list(tmp_path.glob(".talk*")) == [], "no temporary file stays"


def test_a_ctrl_c_stops_the_answer_and_not_the_chat(chat, monkeypatch):
    """What was said stays in the text; a second Ctrl-C need not wait for the device."""
    plain, turns = Conversation.answer, []

    def interrupted(self, ids, **options):
        turns.append((list(ids), self.kept))
        for tokens in plain(self, ids, **options):
            for _ in range(2 if len(turns) == 2 else 1):
                signal.raise_signal(signal.SIGINT)
            yield tokens

    monkeypatch.setattr(Conversation, "answer", interrupted)
    before = signal.getsignal(signal.SIGINT)
    out, err = chat("the sand", "more", "again", options=("--quiet", *FEW))
    assert signal.getsignal(signal.SIGINT) is before
    assert len(turns) == 3 and err == ""
    first, second, third = (ids for ids, _ in turns)
    assert second[: len(first) + 1] != first and second[: len(first)] == first
    assert third[: len(first)] == first, "the text that nobody answered is gone"
    assert out.count("\n") >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", "9999"], "the cache must have 2 to 512 slots"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--weights", "int3"], "must be one of auto"),
        (["--cache", "int9"], "cache: must be one of f32, f16"),
        (["--seed", "2147483648"], "chat: `seed` must be 32 bits wide"),
    ],
)
def test_refusals(path, capsys, options, message):
    assert main(["chat", path, *options]) == 2
    out, err = capsys.readouterr()
    assert message in err and (out, err.count("\n")) == ("", 1)


def test_a_text_longer_than_the_cache_is_one_line(chat):
    out, err = chat(
        "the " * 100,
        "the",
        options=("--slots", "40", "--quiet", "--cache", "int8", *FEW),
    )
    assert "tokens, the cache 40 slots. Begin anew with /clear" in err
    assert err.count("\n") == 1 and out.strip()


IN_ITS_TERMINAL = """
import os, signal, sys
os.login_tty(0)  # a Ctrl-C typed there is a signal
# which a job in the background would ignore
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxkern.models import conversation
from jaxkern.models.command_line import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_in_a_terminal(path, tmp_path):
    """Lines edited and echoed, colours, signals: what no pipe has."""
    import pty

    main_end, its_end = pty.openpty()
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "TERM": "xterm",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-c", IN_ITS_TERMINAL, "chat", path, "--max-tokens", "5"]
    command += ["--backend", "xla", "--system", "Be brief."]
    process = subprocess.Popen(
        command,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    os.close(its_end)
    shown = ""

    def wait_for(pattern, again=b"", seconds=120):
        """`again` is typed each second: readline may miss one that comes early."""
        nonlocal shown
        start = time.monotonic()
        while not (found := re.search(pattern, shown, re.DOTALL)):
            assert time.monotonic() - start < seconds, shown
            if select.select([main_end], [], [], 1)[0]:
                try:
                    shown += os.read(main_end, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert re.search(pattern, shown, re.DOTALL), shown
                    return
            elif again:
                os.write(main_end, again)
        shown = shown[found.end() :]

    try:
        wait_for(r"m\.gguf\. /help lists the commands.*> ")
        os.write(main_end, b"the sand\r")
        wait_for(r"the sand.*\[read \d+ tokens, .* of 512 slots\].*> ")
        os.write(main_end, b"\x03")
        wait_for(r"\(/quit or Ctrl-D ends\).*> ", again=b"\x03")
        os.write(main_end, b"/quit\r")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
