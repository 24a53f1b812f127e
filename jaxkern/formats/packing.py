"""`Packing`: which tensors of a folder are parts of packed weights.

Every method (`quantized_folder.py`) finds its modules, asks here for their parts with
the shapes that its keys say, and adds the weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxkern.formats.architecture_keys import ArchitectureKeys, KeyFile
from jaxkern.formats.packed_matrix import PackedMatrix

CONFIG = "quantization_config"
SCALES = ("F32", "BF16", "F16")
# of activations, which are not rounded here
OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale"),
    *("activation_scale", "weight_activation_scale"),
)


class Folder(KeyFile, Protocol):
    """What of a `SafetensorsFolder` is read here."""

    def view(self, name: str) -> np.ndarray: ...


@dataclass
class Packing:
    """Packed weights of a folder, and which tensors belong to them.

    Attributes:
      matrices: by the names of the weights.
      taken: tensors that are no weights of their own any more.
    """

    folder: Folder
    matrices: dict[str, PackedMatrix] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def part(self, name: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> str:
        """A tensor that must be there, of one of these dtypes and shapes."""
        info, dtypes = self.folder.tensors.get(name), tuple(dtypes)
        if info is None:
            raise self.folder.error(f"has no tensor {name}, of a packed weight")
        if info.qtype not in dtypes or info.shape not in shapes:
            raise self.folder.error(
                f"tensor {name} is {info.qtype} {info.shape}, expected "
                f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))} by "
                f"{CONFIG} and the tensors beside it"
            )
        return name

    def add(self, weight: str, matrix: PackedMatrix) -> None:
        """A weight in the place of its parts."""
        parts = {*matrix.parts.values()}
        if weight in self.folder.tensors and weight not in parts:
            raise self.folder.error(f"tensor {weight} is there packed and as it is")
        self.matrices[weight] = matrix
        module = weight.removesuffix(".weight")
        activations = (f"{module}.{name}" for name in OF_ACTIVATIONS)
        also = (f"{weight}_activation_scale", *activations)
        self.taken |= parts | {name for name in also if name in self.folder.tensors}

    def refuse(self, unpacked: Iterable[str]) -> None:
        """Raises where a packed weight is of a module that should not be."""
        for name in unpacked:
            for weight in self.matrices:
                if f"{weight}.".startswith(f"{name}."):
                    raise self.folder.error(
                        f"{CONFIG} leaves {name} as it is, but tensor {weight} is "
                        "packed"
                    )


def modules(packing: Packing, part: str) -> list[str]:
    """Modules that have a tensor of this name, which must be a matrix."""
    found = []
    for name, info in packing.folder.tensors.items():
        if not name.endswith(f".{part}"):
            continue
        if len(info.shape) != 2 or 0 in info.shape:
            raise packing.folder.error(
                f"tensor {name} is {info.qtype} {info.shape}, expected a matrix"
            )
        found.append(name.removesuffix(f".{part}"))
    return found


def known(keys: ArchitectureKeys, key: str, *values: str) -> str:
    """A string that is one of `values`, the first where it is missing."""
    value = keys.string(key, values[0])
    if value.lower() not in values:
        raise keys.error(key, f"expected {' or '.join(values)}")
    return value.lower()


def names_of(keys: ArchitectureKeys, *lists: str) -> list[str]:
    """The names, without patterns, of modules that are left as they are."""
    found = [name for key in lists for name in keys.strings(key)]
    return [name for name in found if name and not name.startswith("re:")]
