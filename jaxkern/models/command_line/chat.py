"""`jaxkern chat`: a conversation with a model, in a terminal or through a pipe."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxkern.formats.printable import printable
from jaxkern.models.command_line.chat_commands import COMMANDS, Chat, do, unknown
from jaxkern.models.command_line.demo import demo_model
from jaxkern.models.command_line.errors import is_of_the_device, one_line
from jaxkern.models.command_line.generate import content
from jaxkern.models.command_line.options import (
    add_cache,
    add_further_files,
    add_quiet_and_cache,
    add_sampling,
    add_weights_and_backend,
    cache_of,
    further_files_of,
    sampling_of,
)
from jaxkern.models.command_line.progress import spinner
from jaxkern.models.command_line.text_stream import TextStream

SLOTS = 4096  # of the cache, where the model's context is not shorter


def add_to(commands) -> None:
    parser = commands.add_parser("chat", help="talk with a model")
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="GGUF file or folder; default: SmolLM2",
    )
    add("--system", metavar="TEXT", help="the message before the conversation")
    add("--max-tokens", type=int, metavar="N", help="of an answer; default: no limit")
    add("--slots", type=int, metavar="N", help=f"of the cache (at most {SLOTS})")
    add_sampling(parser)
    add_weights_and_backend(parser)
    add_further_files(parser)
    add_cache(parser)
    add_quiet_and_cache(parser)


def run(options: argparse.Namespace) -> int:
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {options.max_tokens}.")
    path = Path(options.model) if options.model else demo_model()

    from jaxkern import backend
    from jaxkern.models.command_line.executables import kept_executables

    with contextlib.ExitStack() as entered:
        entered.enter_context(backend(options.backend))
        entered.enter_context(kept_executables(not options.no_cache))
        chat = _open(options, path)
        _say(chat, f"{path.name}. /help lists the commands, /quit ends.")
        _talk(chat)
    return 0


def _open(options: argparse.Namespace, path: Path) -> Chat:
    from jaxkern.models.conversation import Conversation
    from jaxkern.models.prompt_rows import check_seed
    from jaxkern.models.text_model import open_model

    check_seed(options.seed, "chat")
    cache = cache_of(options)
    with spinner(f"loading {path.name}", quiet=options.quiet):
        model = open_model(path, options.weights, **further_files_of(options))
    slots = min(SLOTS, model.config.context) if options.slots is None else options.slots
    conversation = Conversation(
        model.config,
        model.weights,
        slots=slots,
        sampling=sampling_of(options, model.sampling),
        stop_ids=tuple(model.tokenizer.stop_ids),
        cache=cache,
    )
    chat = Chat(
        model,
        conversation,
        max_tokens=options.max_tokens,
        seed=options.seed,
        quiet=options.quiet,
    )
    chat.set_system(options.system or "")
    chat.encode([{"role": "user", "content": "?"}])  # no template: said before a prompt
    return chat


def _talk(chat: Chat) -> None:
    """Reads lines and answers them until /quit or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (`input` then edits lines and remembers them)
    while True:
        try:
            line = _read_line(chat)
        except EOFError:
            _say(chat, "")
            return
        except KeyboardInterrupt:
            _say(chat, "\n(/quit or Ctrl-D ends)")
            continue
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        try:
            if word in COMMANDS:
                if (said := do(chat, line)) is None:
                    return
                _say(chat, said, always=True)
            elif word.startswith("/") and "/" not in word[1:]:
                raise ValueError(unknown(word))
            elif word:
                _answer(chat, line)
        except (
            ValueError,
            TypeError,
            OSError,
            RuntimeError,
            MemoryError,
            ImportError,
        ) as error:
            _complain(error)
        except KeyboardInterrupt:
            print()
            _say(chat, "(stopped)")


def _read_line(chat: Chat) -> str:
    """One line; with a backslash at its end the next one too."""
    mark = "> " if sys.stdin.isatty() else ""
    lines = [input(mark)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(mark and ". "))
    text = "\n".join(lines)
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _answer(chat: Chat, line: str) -> None:
    """Streams the answer to stdout; a Ctrl-C keeps what was said until then."""
    message = {"role": "user", "content": content(line, chat.waiting)}
    chat.messages.append(message)
    stream = TextStream(chat.model.tokenizer)
    stopped = False
    try:
        ids = chat.encode(chat.messages)
        with (
            spinner("reading", quiet=chat.quiet) as say,
            _interrupts() as interrupted,
        ):
            chat.conversation.tell = say
            for tokens in chat.conversation.answer(
                ids, images=chat.shown(), max_tokens=chat.max_tokens, seed=chat.seed
            ):
                piece = stream.push(tokens)
                if piece:
                    say(None)
                    print(piece, end="", flush=True)
                if stopped := bool(interrupted):
                    break
    except BaseException:
        if not stream.text:
            chat.messages.pop()  # nobody answered it
            raise
        chat.answered(stream.text)
        raise
    print(stream.rest(), flush=True)
    chat.answered(stream.text)
    if stopped:
        _say(chat, "(stopped)")
    _say(chat, chat.statistics())


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Gathers the first Ctrl-C in a list; a second one is a KeyboardInterrupt."""
    found: list[int] = []

    def gather(number: int, frame: object) -> None:
        if found:
            raise KeyboardInterrupt
        found.append(number)

    try:
        before = signal.signal(signal.SIGINT, gather)
    except ValueError:  # not the main thread, which alone hears signals
        yield found
        return
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def _say(chat: Chat, text: str, *, always: bool = False) -> None:
    """On stderr, so that stdout has the answers alone."""
    if always or not chat.quiet:
        print(printable(text), file=sys.stderr, flush=True)


def _complain(error: Exception) -> None:
    """One line; a fault of this program is raised again."""
    if isinstance(error, RuntimeError) and not is_of_the_device(error):
        raise error
    print(f"jaxkern: {one_line(error)}", file=sys.stderr, flush=True)
