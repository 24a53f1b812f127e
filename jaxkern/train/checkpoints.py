"""Checkpoints of a run: the state by orbax, what it belongs to, sums of its files.

    checkpoints/40/state/          each process writes its own part
    checkpoints/40/run.json        the run: its configuration, digest of its data
    checkpoints/40/manifest.json   size and CRC-32 of each file; written last

Without its manifest a checkpoint is half written; one with another file is damaged.
Neither is read.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkern.train.placement import is_first, wait_for_all

MANIFEST, RUN, STATE = "manifest.json", "run.json", "state"
BLOCK = 2**22  # bytes read at once


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from: which, why, and what to do."""


class Checkpoints:
    """The checkpoints in a folder.

    Args:
      folder: made where there is none.
      keep: how many of the newest stay.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int):
        self.folder, self.keep = Path(folder).absolute(), keep

    def steps(self) -> list[int]:
        """Of every checkpoint, whole or not, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> None:
        """Writes one, by all processes, and removes the oldest ones."""
        import orbax.checkpoint as ocp

        place = self.folder / str(step)
        if is_first():
            if place.exists():  # half written
                shutil.rmtree(place)
            place.mkdir(parents=True)
        wait_for_all(f"checkpoint {step}")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(place / STATE, state)
            checkpointer.wait_until_finished()
        wait_for_all(f"checkpoint {step} is written")
        if is_first():
            (place / RUN).write_text(json.dumps(run, indent=1))
            whole = place / f"{MANIFEST}.part"
            whole.write_text(json.dumps(sums_of(place), indent=1))
            whole.rename(place / MANIFEST)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.folder / str(old))
        wait_for_all(f"checkpoint {step} is whole")

    def run_of(self, step: int) -> dict[str, Any]:
        """What the checkpoint belongs to, if it is whole.

        Raises:
          CheckpointError: it is not there, half written or damaged.
        """
        if why := self.fault(step):
            earlier = [s for s in self.steps() if s < step and not self.fault(s)]
            advice = "No earlier one is whole: --from 0 begins anew."
            if earlier:
                advice = f"The one before it is whole: --from {earlier[-1]}."
            raise CheckpointError(f"{self.folder / str(step)}: {why}. {advice}")
        return json.loads((self.folder / str(step) / RUN).read_bytes())

    def fault(self, step: int) -> str | None:
        """Why this one is not to be read, or None."""
        place = self.folder / str(step)
        if not place.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            return f"there is no such checkpoint, but {there}"
        try:
            listed = json.loads((place / MANIFEST).read_bytes())
        except FileNotFoundError:
            return "the checkpoint is half written, it has no manifest.json"
        except (ValueError, RecursionError):
            return "manifest.json is damaged"
        found = sums_of(place)
        for name in sorted(listed.keys() | found.keys()):
            if name not in found:
                return f"file {name} is missing"
            if name not in listed:
                return f"file {name} was not written with it"
            if listed[name] != found[name]:
                return f"file {name} is damaged: it has other bytes than were written"
        return None

    def restore(self, step: int, like: Any) -> Any:
        """The state, its arrays cut as those of `like`."""
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.folder / str(step) / STATE, like)

    def forget_after(self, step: int) -> None:
        """Removes what is newer: the run goes on from this one."""
        wait_for_all("forget")  # all have looked
        if is_first():
            for newer in self.steps():
                if newer > step:
                    shutil.rmtree(self.folder / str(newer))
        wait_for_all("forgotten")


def sums_of(place: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file of a checkpoint but the manifest."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if path.is_file() and not name.startswith(MANIFEST):
            value = 0
            with open(path, "rb") as file:
                while block := file.read(BLOCK):
                    value = zlib.crc32(block, value)
            found[name] = [path.stat().st_size, value]
    return found
