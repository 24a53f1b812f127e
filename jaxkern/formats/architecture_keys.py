"""`architecture_keys`: what a file says of its model, no key of it overlooked.

A key that a loader does not know can change what the model computes (a scale, a cap,
another mask), so a file with such a key must not load as if it were not there.
"""

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

# Keys that change nothing in the logits, whatever the architecture, and why.
HARMLESS: Mapping[str, str] = {
    "vocab_size": "the embedding has as many rows as there are tokens",
    "expert_used_count": "of the experts; with none of them it counts nothing",
    "attention.layer_norm_epsilon": "of norms that subtract the mean",
    "rope.scaling.finetuned": "how the weights came about",
    "pooling_type": "how one embedding is made of the hidden states; logits are not",
}

# What else says "without", as llama.cpp writes it where a model has no such thing.
WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),  # pairs of neighbours rotate
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "rope.scaling.alpha": (0.0,),
}


class KeyFile(Protocol):
    """A file with keys `<architecture>.*`, such as `GGUFFile`."""

    @property
    def path(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def error(self, message: str) -> ValueError: ...


FLOAT32_MAX = float(np.finfo(np.float32).max)


class ArchitectureKeys:
    """Typed reads of the keys `<architecture>.*`; remembers which were read."""

    def __init__(
        self,
        file: KeyFile,
        harmless: Mapping[str, str],
        without: Mapping[str, tuple[Any, ...]],
    ):
        self.file, self.arch = file, file.architecture
        self.harmless, self.without = harmless, without
        self._seen: set[str] = set()
        self._within = ""

    def within(self, key: str) -> "ArchitectureKeys":
        """The keys `key.*` by their own names; what is read of them counts here too."""
        inner = ArchitectureKeys(self.file, self.harmless, self.without)
        inner._seen, inner._within = self._seen, f"{self._within}{key}."
        return inner

    def has(self, key: str) -> bool:
        return self._name(key) in self.file.metadata

    def has_within(self, key: str) -> bool:
        """Whether there are keys `key.*`."""
        return any(n.startswith(f"{self._name(key)}.") for n in self.file.metadata)

    def error(self, key: str, message: str) -> ValueError:
        """About the key and its value: `message` goes on after "key k is v, "."""
        value = _shown(self.file.metadata.get(self._name(key)))
        return self.file.error(f"key {self._name(key)} is {value}, {message}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of 32 bits, or an array in which each layer has the same one."""
        value = self._get(key, (int,), "an integer", default)
        if not 0 <= value < 2**31:
            raise self.error(key, f"expected 0 to {2**31 - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._float(key, default)
        if not 0 < value < math.inf:
            raise self.error(key, "expected a positive number")
        return value

    def number_or_none(self, key: str) -> float | None:
        """A positive number; None where the key is missing or 0, which means none."""
        value = self._float(key, 0.0)
        if not 0 <= value < math.inf:
            raise self.error(key, "expected a positive number, or 0 for none")
        return value or None

    def number_unless_negative(self, key: str) -> float | None:
        """A number, None where it is missing or negative: llama.cpp's "not set"."""
        value = self._float(key, -1.0)
        if not -math.inf < value < math.inf:
            raise self.error(key, "expected a finite number")
        return value if value >= 0 else None

    def string(self, key: str, default: str) -> str:
        return self._get(key, (str,), "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        self._seen.add(self._name(key))
        value = self.file.metadata.get(self._name(key), default)
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false")
        return value

    def flags(self, key: str) -> list[bool]:
        """A list of true and false, empty where it is missing."""
        self._seen.add(self._name(key))
        value = self.file.metadata.get(self._name(key), [])
        array = np.asarray(value) if isinstance(value, list | np.ndarray) else None
        if array is None or array.ndim != 1 or (array.size and array.dtype != bool):
            raise self.error(key, "expected a list of true or false")
        return [bool(x) for x in array]

    def strings(self, key: str) -> list[str]:
        """A list of strings, empty where it is missing."""
        self._seen.add(self._name(key))
        value = self.file.metadata.get(self._name(key), [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.error(key, "expected a list of strings")
        return value

    def value(self, key: str, default: Any = None) -> Any:
        """As in the file, for the caller to check; `default` where it is missing."""
        self._seen.add(self._name(key))
        return self.file.metadata.get(self._name(key), default)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers, empty where it is missing."""
        self._seen.add(self._name(key))
        value = self.file.metadata.get(self._name(key), [])
        array = np.asarray(value) if isinstance(value, list | np.ndarray) else None
        if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
            if array is None or array.size:
                raise self.error(key, "expected a list of numbers")
            return []
        if not np.isfinite(array).all():
            raise self.error(key, "expected finite numbers")
        return [float(x) for x in array]

    def per_layer(self, key: str) -> list[int] | None:
        """The integers of an array, one of each layer, or of a scalar just that one."""
        self._seen.add(self._name(key))
        value = self.file.metadata.get(self._name(key))
        if value is None:
            return None
        array = np.atleast_1d(value)
        if array.dtype.kind not in "iu" or array.ndim != 1 or not array.size:
            raise self.error(key, "expected an integer or one for each layer")
        return array.tolist()

    def refuse_unread(self) -> None:
        """Raises for the first key of the architecture that nobody read."""
        for name, value in self.file.metadata.items():
            prefix, _, key = name.partition(".")
            if prefix != self.arch or name in self._seen or key in self.harmless:
                continue
            if f"{key.partition('.')[0]}.*" in self.harmless:
                continue
            without = self.without.get(key, ())
            if _scalar(value) and any(
                type(value) is type(other) and value == other for other in without
            ):
                continue
            known = " or ".join(repr(other) for other in without)
            seen = sorted(key.removeprefix(f"{prefix}.") for key in self._seen)
            near = difflib.get_close_matches(key, seen, 1, cutoff=0.8)
            raise self.file.error(
                f"key {name} is {_shown(value)}, which the model of architecture "
                f"{self.arch} here does not have"
                f"{f' (it may be {known})' if known else ''}"
                f"{f'; the nearest one is {near[0]}' if near else ''}. Without it "
                "another model would be computed: use a program that supports this key"
            )

    def _name(self, key: str) -> str:
        return f"{self.arch}.{self._within}{key}"

    def _float(self, key: str, default: float | None) -> float:
        value = self._get(key, (int, float), "a number", default)
        if FLOAT32_MAX < abs(value) != math.inf:  # JSON has integers of any length
            raise self.error(key, "expected a number that float32 holds")
        return float(value)

    def _get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        self._seen.add(self._name(key))
        value = self.file.metadata.get(self._name(key), default)
        if value is None:
            raise self.file.error(f"has no key {self._name(key)}")
        if isinstance(value, np.ndarray) and value.size and float not in kinds:
            if np.any(value != value[0]):
                raise self.error(key, "expected the same in every layer")
            value = value[0].item()
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.error(key, f"expected {what}")
        return value


@contextlib.contextmanager
def architecture_keys(
    file: KeyFile,
    harmless: Mapping[str, str] = HARMLESS,
    without: Mapping[str, tuple[Any, ...]] = WITHOUT,
) -> Iterator[ArchitectureKeys]:
    """The keys of the file's architecture; at the end all of them must have been read.

        with architecture_keys(file) as keys:
            config = Config(layers=keys.integer("block_count"), ...)

    A key need not be read if it is in `harmless`, which may say "key.*" for all in it,
    or has a value of `without`, which says that the model has no such thing.

    Raises:
      ValueError: of the file's kind: a key is missing, has another type or range, or
        was not read.
    """
    keys = ArchitectureKeys(file, harmless, without)
    yield keys
    keys.refuse_unread()


def _scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _shown(value: Any) -> str:
    """A value of a file, short enough for one line."""
    if isinstance(value, np.ndarray):
        value = value[:9].tolist()
    elif isinstance(value, list):
        value = value[:9]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
