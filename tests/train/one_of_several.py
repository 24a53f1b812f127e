"""One process of a training run, for `test_two_processes.py`.

    python -m tests.train.one_of_several PORT COUNT INDEX FOLDER KILLED

PORT 0 is a run of this process alone. With a FOLDER other than "-" it goes on from the
checkpoint there, or writes one after SAVED steps; then process KILLED dies.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, SAVED = 6, 3


def run(folder: Path | None, killed: bool) -> list[str]:
    """A digest of the state after SAVED steps, as it was or as it was read, then the
    losses as hexadecimal numbers, so that no bit is lost."""
    import jaxkern

    assert "jaxkern.models" not in sys.modules, "`import jaxkern` brings models with it"
    train = jaxkern.train
    assert "optax" not in sys.modules, "an optional dependency is imported"
    from tests.train.tiny_llama import batches, loss_of_one_layer, weights_of

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(x, *spec):
        x, cut = np.asarray(x), NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(x.shape, cut, lambda at: x[at])

    loss, adamw = loss_of_one_layer(), train.AdamW(1e-3)
    step = train.train_step(loss, adamw, compute_dtype=jnp.float32)
    state = step.init(
        jax.tree.map(lambda w: placed(w, *"x" * (w.ndim == 2)), weights_of(layers=1))
    )
    manager = None
    if folder is not None:
        import orbax.checkpoint as ocp

        manager = ocp.CheckpointManager(folder)
        last = manager.latest_step()
        if last is not None:
            state = manager.restore(last, args=ocp.args.StandardRestore(state))
    said = [digest(state)] if int(state.steps) == SAVED else []
    for i, batch in [*enumerate(batches(STEPS))][int(state.steps) :]:
        state, metrics = step(state, placed(batch, "x"))
        said.append(float(metrics.loss).hex())
        if i + 1 == SAVED:
            said.insert(0, digest(state))
        if manager is not None and i + 1 == SAVED:
            import orbax.checkpoint as ocp

            manager.save(SAVED, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
    return said


def digest(state) -> str:
    """Of every bit of it, gathered from all processes."""
    whole = multihost_utils.process_allgather(state, tiled=True)
    parts = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    port, count, index, folder, killed = sys.argv[1:]
    if port != "0":
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    where = None if folder == "-" else Path(folder)
    print("losses", *run(where, killed == index), flush=True)
