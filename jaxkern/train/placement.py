"""How the arrays of a run lie on its devices: copied, or cut."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "devices"


class Placement:
    """Over all devices of all processes.

    Args:
      layout: of `run_config.Devices`.

    Attributes:
      mesh: None for one device.
    """

    def __init__(self, layout: str):
        self.layout, self.count = layout, jax.device_count()
        self.mesh = None
        if self.count > 1:
            self.mesh = jax.make_mesh(
                (self.count,), (AXIS,), axis_types=(AxisType.Auto,)
            )

    def weights(self, tree: Any) -> Any:
        """With "fsdp" arrays of floats are cut along the longest dim that divides."""

        def spec(x: Any) -> P:
            floats = jax.numpy.issubdtype(x.dtype, np.floating)
            if self.layout != "fsdp" or x.ndim < 2 or not floats:
                return P()
            fit = [d for d in range(x.ndim) if x.shape[d] % self.count == 0]
            if not fit:
                return P()
            longest = max(fit, key=lambda d: x.shape[d])
            return P(*(AXIS if d == longest else None for d in range(x.ndim)))

        return jax.tree.map(lambda x: self.placed(x, spec(x)), tree)

    def batch(self, batch: Any) -> Any:
        """Rows over the devices."""
        return jax.tree.map(lambda x: self.placed(x, P(AXIS)), batch)

    def placed(self, x: Any, spec: P) -> jax.Array:
        """Each process has the whole array and gives its devices their parts."""
        if self.mesh is None:
            return jax.numpy.asarray(x)
        cut = NamedSharding(self.mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(x, cut)
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, cut, lambda at: whole[at])

    def check_rows(self, rows: int, accumulate: int) -> None:
        """Raises ValueError where a part of a batch cannot be cut over the devices."""
        if rows // accumulate % self.count:
            raise ValueError(
                f"data.rows / accumulate must be a multiple of the {self.count} "
                f"devices, got {rows} / {accumulate}."
            )


def gathered(tree: Any) -> Any:
    """The arrays whole, on each process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def is_first() -> bool:
    """Whether this process writes what one process writes."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def said_by_any(flag: bool) -> bool:
    """Whether some process says so."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array(flag)).any())
