"""`FolderTensors`: the tensors of a folder, each checked where it is taken.

A tensor that no page takes can change what the model computes, so that `refuse_rest`
names the first one left.
"""

import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkern import MicroscaledTensor, dequantize
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models.llama import Matrices
from jaxkern.models.llama_gguf import Policy, expand

FLOATS = ("F32", "F16", "BF16")


class FolderTensors:
    """Reads tensors by name and shape, kept as the policy says.

    Policies as in `choose_policy`: "f32" and "bf16" decode, "packed" and "packed_int8"
    keep what the file has.
    """

    def __init__(self, folder: SafetensorsFolder, policy: Policy):
        self.folder, self.policy = folder, policy
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.folder.tensors

    def rows(
        self, name: str, shape: tuple[int, ...], qtypes: Sequence[str] = FLOATS
    ) -> np.ndarray:
        """The tensor as in the file."""
        info = self.folder.tensors.get(name)
        if info is None:
            raise self.folder.error(f"has no tensor {name}")
        if info.shape != shape or info.qtype not in qtypes:
            raise self.folder.error(
                f"tensor {name} is {info.qtype} {info.shape}, expected "
                f"{' or '.join(qtypes)} {shape} by config.json"
            )
        self._taken.add(name)
        return self.folder.view(name)

    def array(
        self, name: str, shape: tuple[int, ...], offset: float = 0.0
    ) -> Float[Array, "..."]:
        """The tensor in float32, plus `offset`."""
        return jnp.asarray(self.rows(name, shape), jnp.float32) + offset

    def array_if(
        self, wanted: bool, name: str, shape: tuple[int, ...]
    ) -> Float[Array, "..."] | None:
        """The tensor in float32 where the architecture has it."""
        return self.array(name, shape) if wanted else None

    def arrays(
        self, names: Sequence[str], sizes: Sequence[int]
    ) -> Float[Array, " f"]:
        """Vectors side by side."""
        pairs = zip(names, sizes, strict=True)
        return jnp.concatenate([self.array(name, (size,)) for name, size in pairs])

    def matrices(self, *rows: np.ndarray) -> Matrices:
        """Matrices `[f, d]` with the same input, side by side."""
        return (expand([jnp.asarray(r) for r in rows], self._dtype(rows[0])),)

    def stack(self, rows: np.ndarray) -> Float[Array, "..."]:
        """`[..., f, d]`, of experts or heads."""
        return jnp.asarray(rows, self._dtype(rows))

    def packed_mxfp4(
        self, codes: np.ndarray, scales: np.ndarray
    ) -> MicroscaledTensor | Float[Array, "e f d"]:
        """Experts of MXFP4: as they are, or decoded where the policy says so."""
        whole = MicroscaledTensor(
            jnp.asarray(codes), jnp.asarray(scales), format="mxfp4"
        )
        if self.policy in ("packed", "packed_int8"):
            return whole
        dtype = jnp.float32 if self.policy == "f32" else jnp.bfloat16
        return dequantize(whole, dtype=dtype)

    def refuse_rest(self, ignored: Mapping[str, str]) -> None:
        """Raises for the first tensor that was not taken.

        Args:
          ignored: patterns of names that change nothing in the logits, and why.
        """
        for name in self.folder.tensors:
            if name in self._taken or any(re.match(p, name) for p in ignored):
                continue
            raise self.folder.error(
                f"tensor {name!r} has no place in a model of type "
                f"{self.folder.architecture} with this config.json"
            )

    def _dtype(self, rows: np.ndarray) -> jnp.dtype:
        if self.policy == "f32":
            return jnp.dtype(jnp.float32)
        if self.policy == "bf16" or jax.default_backend() == "gpu":
            return jnp.dtype(jnp.bfloat16)
        return jnp.dtype(rows.dtype)
