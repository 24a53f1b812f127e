"""What `autotune` found, as records that print."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class TunedCall:
    """What `autotune` found of one call.

    Attributes:
      key: the op with its operands and options, as the table has them.
      sites: how many calls of the function are the same.
      microseconds: of one call by each implementation that can be chosen.
      left: the other implementations, and why they cannot.
      usual: what runs without the table.
      choice: what runs with it.
    """

    key: str
    sites: int
    microseconds: Mapping[str, float]
    left: Mapping[str, str]
    usual: str
    choice: str

    @property
    def gain(self) -> float:
        """Microseconds that the choice saves in all calls, each timed alone."""
        us = self.microseconds
        return self.sites * (us[self.usual] - us[self.choice])

    def __str__(self) -> str:
        lines = [self.key + f" ({self.sites} call sites)" * (self.sites > 1)]
        for name, us in sorted(self.microseconds.items(), key=lambda item: item[1]):
            words = ", usual" * (name == self.usual)
            words += ", chosen" * (name == self.choice)
            lines.append(f"  {us:10.4g} us  {name}{words}")
        lines += [f"  not {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `autotune` found and wrote.

    Attributes:
      path: of the table.
      device: whose times these are.
      calls: one `TunedCall` for each call that has several implementations.
      function: microseconds of the whole function with the "usual" choices and with
        the "tuned" ones; empty where these are the same.
      not_entered: keys of calls that could not be measured alone, such as those inside
        of shard_map.
    """

    path: Path
    device: str
    calls: tuple[TunedCall, ...]
    function: Mapping[str, float]
    not_entered: tuple[str, ...]

    def __str__(self) -> str:
        number = f"{len(self.calls)} call" + "s" * (len(self.calls) != 1)
        lines = [f"{self.path}: {number} on {self.device}", *map(str, self.calls)]
        lines += [f"{key}\n  not measured alone" for key in self.not_entered]
        if self.function:
            times = (f"{us:.4g} us {name}" for name, us in self.function.items())
            lines.append(f"the whole function: {', '.join(times)}")
        return "\n".join(lines)

    __repr__ = __str__
