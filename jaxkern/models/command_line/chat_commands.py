"""The state of a chat, and the commands that begin with a slash."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkern.models.command_line.options import SAMPLING, set_one
from jaxkern.models.command_line.statistics import rate, speed

if TYPE_CHECKING:
    from jaxkern.models.conversation import Conversation
    from jaxkern.models.image_rule import Picture
    from jaxkern.models.text_model import TextModel

ROLES = ("system", "user", "assistant")
LONGEST_FILE = 2**26  # bytes of a conversation


@dataclass
class Chat:
    """What one chat has.

    Attributes:
      messages: of system, user and model, in order.
      text: the prompt of the latest answer and the answer, whose tokens are
        `conversation.ids`.
      own_file: the file that /save wrote or /load read: only this one is overwritten.
      waiting: names of images that the next message shows.
      pictures: those of the conversation by their names.
    """

    model: "TextModel"
    conversation: "Conversation"
    max_tokens: int | None
    seed: int
    quiet: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    own_file: Path | None = None
    waiting: list[str] = field(default_factory=list)
    pictures: dict[str, "Picture"] = field(default_factory=dict)

    def set_system(self, text: str) -> None:
        self.messages = [m for m in self.messages if m["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def picture(self, name: str) -> "Picture":
        """An image that is read once, as it was then."""
        from jaxkern.models.image_rule import preprocess

        if name not in self.pictures:
            self.pictures[name] = preprocess(name, self.model.config)
        return self.pictures[name]

    def shown(self) -> list["Picture"]:
        """The images of all messages, in order."""
        parts = [
            p
            for m in self.messages
            if isinstance(m["content"], list)
            for p in m["content"]
        ]
        return [self.picture(p["image"]) for p in parts if p["type"] == "image"]

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The whole text in tokens: those of the text before, if it goes on there."""
        tokenizer, before = self.model.tokenizer, self.text
        self.text = text = tokenizer.chat(messages)
        if before and text.startswith(before):
            more = tokenizer.continued(text[len(before) :])
            if more is not None:
                return [*self.conversation.ids, *more]
        return tokenizer.encode(text, special=True)

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.text += text
        self.waiting = []

    def statistics(self) -> str:
        """Of the latest answer, in one line."""
        talk = self.conversation
        took = talk.timings
        read = rate(took.prefill_tokens, took.prefill_seconds)
        write = rate(took.decode_steps, took.decode_seconds)
        return (
            f"[read {took.prefill_tokens} tokens, {speed(read)}; wrote {speed(write)}; "
            f"{talk.filled} of {talk.slots} slots]"
        )


def _help(chat: Chat, rest: str) -> str:
    """this list"""
    lines = [f"{name} {(use.__doc__ or '')}" for name, use in COMMANDS.items()]
    return "\n".join([*lines, "A line that ends in \\ goes on in the next one."])


def _clear(chat: Chat, rest: str) -> str:
    """: begins anew; the system message stays"""
    chat.messages = [m for m in chat.messages if m["role"] == "system"]
    chat.text, chat.waiting, chat.pictures = "", [], {}
    chat.conversation.forget()
    return "(forgotten)"


def _image(chat: Chat, rest: str) -> str:
    """FILE: the next message shows this image"""
    path = _path(rest, "/image")
    chat.pictures.pop(str(path), None)  # the file may have changed
    picture = chat.picture(str(path))
    chat.waiting.append(str(path))
    return f"({picture.columns} x {picture.rows} patches, with the next message)"


def _system(chat: Chat, rest: str) -> str:
    """TEXT: sets the system message; without TEXT there is none"""
    before = [dict(message) for message in chat.messages]
    chat.set_system(rest)
    try:  # a template may know no system message
        chat.model.tokenizer.chat([*chat.messages, {"role": "user", "content": "?"}])
    except ValueError:
        chat.messages = before
        raise
    return "(system message set)" if rest else "(no system message)"


def _set(chat: Chat, rest: str) -> str:
    """NAME VALUE: temperature, top-k, ..., max-tokens, seed; alone: shows them"""
    if not rest:
        shown = {
            name: getattr(chat.conversation.sampling, f)
            for name, (f, _, _) in SAMPLING.items()
        }
        shown |= {"max-tokens": chat.max_tokens, "seed": chat.seed}
        return "\n".join(f"{name} {_value(value)}" for name, value in shown.items())
    name, _, text = rest.partition(" ")
    name, text = name.replace("_", "-"), text.strip()
    if name in SAMPLING:
        talk = chat.conversation
        talk.sampling = set_one(talk.sampling, name, text)
    elif name in ("max-tokens", "seed"):
        if name == "max-tokens" and text == "none":
            chat.max_tokens = None
        else:
            _set_integer(chat, name, text)
    else:
        known = ", ".join((*SAMPLING, "max-tokens", "seed"))
        raise ValueError(f"/set: no {name!r}, but {known}.")
    return f"({name} {text})"


def _set_integer(chat: Chat, name: str, text: str) -> None:
    least, field_name = {"max-tokens": (1, "max_tokens"), "seed": (0, "seed")}[name]
    if not text.isdecimal() or not least <= int(text) < 2**31:
        raise ValueError(f"/set {name}: expected {least} to {2**31 - 1}, got {text!r}.")
    setattr(chat, field_name, int(text))


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _stats(chat: Chat, rest: str) -> str:
    """: speeds of the latest answer, the cache, the model"""
    talk, model = chat.conversation, chat.model
    return "\n".join(
        [
            f"model {model.path}",
            f"weights {model.policy}: {model.reason}",
            f"messages {len(chat.messages)}",
            chat.statistics(),
            f"{talk.kept} tokens of the latest text were in the cache",
            f"load {model.seconds:.2f} s, compile {talk.compile_seconds:.2f} s",
        ]
    )


def _save(chat: Chat, rest: str) -> str:
    """FILE: writes the conversation, as JSON"""
    path = _path(rest, "/save")
    if path.exists() and path != chat.own_file:
        raise ValueError(f"/save: {path} is there already. Give another name.")
    text = json.dumps({"messages": chat.messages}, indent=1, ensure_ascii=False)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    chat.own_file = path
    return f"({len(chat.messages)} messages in {path})"


def _load(chat: Chat, rest: str) -> str:
    """FILE: goes on with a conversation that /save wrote"""
    path = _path(rest, "/load")
    if not path.is_file():
        raise ValueError(f"/load: {path} is no file.")
    if path.stat().st_size > LONGEST_FILE:
        raise ValueError(f"/load: {path} has more than {LONGEST_FILE} bytes.")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"/load: {path} is not JSON: {error}.") from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(
            f'/load: {path} has no "messages" of a role ({", ".join(ROLES)}) and a '
            "content each."
        )
    chat.messages, chat.own_file = messages, path
    return f"({len(messages)} messages)"


def _is_message(m: object) -> bool:
    return (
        isinstance(m, dict)
        and m.keys() == {"role", "content"}
        and m["role"] in ROLES
        and (
            _is_text(m["content"])
            or (isinstance(m["content"], list) and all(map(_is_part, m["content"])))
        )
    )


def _is_text(value: object) -> bool:
    """One that can be saved again: JSON may have half a pair of surrogates."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _is_part(part: object) -> bool:
    """Of a message with images."""
    kinds = ({"type", "text"}, {"type", "image"})
    return (
        isinstance(part, dict)
        and {*part} in kinds
        and all(map(_is_text, part.values()))
        and part["type"] in part
    )


def _path(name: str, command: str) -> Path:
    if not name:
        raise ValueError(f"{command}: give the name of a file.")
    return Path(name).expanduser().resolve()


def _quit(chat: Chat, rest: str) -> None:
    """: ends, as Ctrl-D does"""


COMMANDS: dict[str, Callable[[Chat, str], str | None]] = {
    "/help": _help,
    "/clear": _clear,
    "/image": _image,
    "/system": _system,
    "/set": _set,
    "/stats": _stats,
    "/save": _save,
    "/load": _load,
    "/quit": _quit,
}


def unknown(word: str) -> str:
    return f"no command {word}, but {', '.join(COMMANDS)}."


def do(chat: Chat, line: str) -> str | None:
    """What a line with a command says, None to end the chat."""
    name, _, rest = line.strip().partition(" ")
    return COMMANDS[name](chat, rest.strip())
