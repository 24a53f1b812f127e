"""What `jaxkern train` and `finetune` are told: a TOML file, every key of it known."""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Literal, get_args

LONGEST = 2**20  # bytes of the file


@dataclass(frozen=True)
class Data:
    """What is read.

    Attributes:
      files: texts of UTF-8; `*` stands for any name.
      records: ArrayRecord files with a text in each record, read by grain.
      tokenizer: "bytes"; "model" for that of the model; or a folder or GGUF file.
      documents: what is one text: each of the "files", "lines" or "paragraphs".
      length: tokens in a row.
      rows: of a batch, on all devices together.
    """

    files: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    tokenizer: str = "model"
    documents: Literal["files", "lines", "paragraphs"] = "files"
    length: int = 512
    rows: int = 8


@dataclass(frozen=True)
class Optimizer:
    """AdamW, its rate rising to `rate` in `warmup` steps and falling as a cosine.

    Attributes:
      final: the share of `rate` at the last step.
      clip_norm: of all gradients together; 0 for any.
    """

    rate: float = 3e-4
    warmup: int = 0
    final: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Checkpoints:
    """Written after every so many steps, at the end and at a Ctrl-C; `keep` stay."""

    every: int = 500
    keep: int = 3


@dataclass(frozen=True)
class Evaluation:
    """Texts whose loss is said after every so many steps, and at the end."""

    files: tuple[str, ...] = ()
    every: int = 500


@dataclass(frozen=True)
class Devices:
    """How arrays lie on several devices: "data" copies the weights, "fsdp" cuts them
    and what the optimiser keeps."""

    layout: Literal["data", "fsdp"] = "data"


@dataclass(frozen=True)
class Lora:
    """Adapters: y = x W + (alpha / rank) (x A) B.

    Attributes:
      targets: the last parts of the products' names in a folder, or "all".
      weights: how the frozen base is kept; see `jaxkern.models.load`. "auto" keeps a
        quantised one as it is and rounds no activations.
      merge: whether a folder with the sums is written beside the adapter.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    weights: str = "auto"
    merge: bool = False


@dataclass(frozen=True)
class RunConfig:
    """One run.

    Attributes:
      model: `path` of a folder or GGUF file; or the keys of the config.json of a new
        one.
      steps: batches.
      out: the folder of everything that is written.
      seed: of new weights and of the order of rows.
      compute_dtype, accumulate: of `train_step`.
      product_dtype, remat: of `next_token_loss`.
      log_every: steps between two lines on a screen that is no terminal.
      lora: None trains every weight.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1000
    out: str = ""
    seed: int = 0
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    product_dtype: Literal["float8_e4m3fn"] | None = None
    accumulate: int = 1
    remat: Literal["none", "attention", "products", "full"] = "none"
    log_every: int = 10
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
    devices: Devices = Devices()
    lora: Lora | None = None


LEAST: Mapping[str, float] = {
    "steps": 1,
    "seed": 0,
    "accumulate": 1,
    "log_every": 1,
    "data.length": 2,
    "data.rows": 1,
    "optimizer.rate": 0,
    "optimizer.warmup": 0,
    "optimizer.final": 0,
    "optimizer.weight_decay": 0,
    "optimizer.b1": 0,
    "optimizer.b2": 0,
    "optimizer.eps": 0,
    "optimizer.clip_norm": 0,
    "checkpoints.every": 1,
    "checkpoints.keep": 1,
    "evaluation.every": 1,
    "lora.rank": 1,
}
MOST: Mapping[str, float] = {
    "optimizer.final": 1,
    "optimizer.b1": 1,
    "optimizer.b2": 1,
    **dict.fromkeys(("steps", "seed", "data.length", "data.rows"), 2**31 - 1),
}
MAY_CHANGE = ("out", "log_every", "checkpoints", "evaluation", "lora.merge")


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
      ValueError: it is too long or no TOML.
      OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise ValueError(f"{fspath(path)}: has more than {LONGEST} bytes.")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{fspath(path)}: is no TOML: {error}.") from None


def with_settings(tables: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The tables with `section.key=value` of the command line, values as in TOML.

    A value that is none is a text.
    """
    found = json.loads(json.dumps(tables, default=str))
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"--set: expected KEY=VALUE, got {setting!r}.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *sections, key = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ValueError(f"--set: {section} of {name} is no section.")
        inner[key] = value
    return found


def run_config(tables: Mapping[str, Any], where: str) -> RunConfig:
    """The run that the tables of a file describe.

    Args:
      tables: as `tomllib` reads them.
      where: the file's name, for errors.

    Raises:
      ValueError: a key that is not known, or a value of another type or out of range.
    """
    found = _section(RunConfig, "", tables, where)
    for name, least in LEAST.items():
        value = _value(found, name)
        if value is None:
            continue
        most = MOST.get(name)
        if not least <= value <= (float("inf") if most is None else most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(f"{where}: {name} must be {bounds}, got {value}.")
    if "path" in found.model and len(found.model) > 1:
        other = next(key for key in found.model if key != "path")
        raise ValueError(
            f"{where}: model has path and {other}. Give the path of a model, or the "
            "keys of a new one's config.json."
        )
    if not found.model:
        raise ValueError(
            f"{where}: has no model. Give model.path, or the keys of a new one's "
            "config.json under [model]."
        )
    if not (found.data.files or found.data.records):
        raise ValueError(f"{where}: has no data. Give data.files.")
    if not found.out:
        raise ValueError(f"{where}: has no out, the folder to write to.")
    if found.data.rows % found.accumulate:
        raise ValueError(
            f"{where}: data.rows must divide into accumulate = {found.accumulate} "
            f"parts, got {found.data.rows}."
        )
    return found


def differing_key(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first key, with dots, in which two runs compute other numbers."""

    def flat(tables: Mapping[str, Any], at: str = "") -> dict[str, Any]:
        found = {}
        for key, value in tables.items():
            inner = isinstance(value, Mapping)
            found |= flat(value, f"{at}{key}.") if inner else {f"{at}{key}": value}
        return found

    a, b = (flat(json.loads(json.dumps(x))) for x in (before, after))
    for key in sorted(a.keys() | b.keys()):
        free = any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
        if not free and a.get(key) != b.get(key):
            return key
    return None


def _section(kind: Any, at: str, given: Any, where: str) -> Any:
    """A dataclass of one table; `at` is its name with a dot, or empty."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: {at[:-1]} must be a section, got {given!r}.")
    hints = typing.get_type_hints(kind)
    if strangers := [key for key in given if key not in hints]:
        raise ValueError(f"{where}: {_unknown(at + strangers[0])}")
    values = {}
    for key, value in given.items():
        values[key] = _converted(hints[key], f"{at}{key}", value, where)
    return kind(**values)


def _unknown(name: str) -> str:
    """That there is no such key, and the nearest that there is."""
    known = known_keys()
    own = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == own]
    sections = {key.partition(".")[0] for key in known if "." in key}
    near = difflib.get_close_matches(name, [*known, *sorted(sections)], 1, cutoff=0.0)
    return f"unknown key {name}; the nearest one is {(same or near)[0]}."


def known_keys() -> list[str]:
    """Every key with its section, such as "data.rows"; those of a model are its own."""
    found = []
    for name, hint in typing.get_type_hints(RunConfig).items():
        section = _dataclass_of(hint)
        inner = typing.get_type_hints(section) if section else ()
        found += [f"{name}.{key}" for key in inner] or [name]
    return ["model.path" if key == "model" else key for key in found]


def _dataclass_of(hint: Any) -> Any:
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((k for k in kinds if dataclasses.is_dataclass(k)), None)


def _converted(hint: Any, name: str, value: Any, where: str) -> Any:
    if section := _dataclass_of(hint):
        return _section(section, f"{name}.", value, where)
    if types.NoneType in get_args(hint):  # which no file can say
        [hint] = (kind for kind in get_args(hint) if kind is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        known = ", ".join(get_args(hint))
        raise ValueError(f"{where}: {name} must be one of {known}, got {value!r}.")
    if typing.get_origin(hint) is tuple:
        listed = [value] if isinstance(value, str) else value
        if isinstance(listed, list) and all(isinstance(x, str) for x in listed):
            return tuple(listed)
        raise ValueError(f"{where}: {name} must be a list of texts, got {value!r}.")
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    expected = {int: "an integer", float: "a number", str: "a text", bool: "true/false"}
    kind = hint if hint in expected else dict
    if type(value) is not kind:
        what = expected.get(kind, "a section")
        raise ValueError(f"{where}: {name} must be {what}, got {value!r}.")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where}: {name} must be finite, got {value}.")
    return value


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = None if config is None else getattr(config, part)
    return config
