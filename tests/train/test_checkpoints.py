"""Checkpoints that are damaged or half written are refused by name.

What orbax reads back was taken as it is: a byte that a disk had changed was a weight.
"""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

from jaxkern.train.checkpoints import CheckpointError, Checkpoints
from jaxkern.train.train_step import TrainState

STATE = TrainState({"w": jnp.arange(6.0).reshape(2, 3)}, None, (jnp.ones(3),), 1, 0)  # pyright: ignore


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three of four checkpoints, each another state."""
    kept = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep=3)
    for step in (1, 2, 3, 10):
        state = STATE._replace(steps=jnp.int32(step), skipped=jnp.int32(0))
        kept.save(step, state, {"about": step})
    return kept


def test_the_newest_stay_and_come_back(three):
    assert three.steps() == [2, 3, 10]
    assert three.run_of(3) == {"about": 3}
    like = STATE._replace(steps=jnp.int32(0), skipped=jnp.int32(0))
    found = three.restore(3, like)
    np.testing.assert_array_equal(found.params["w"], STATE.params["w"])
    assert int(found.steps) == 3 and found.copy is None
    with pytest.raises(CheckpointError, match="no such checkpoint, but 2, 3, 10"):
        three.run_of(4)


def largest(place):
    return max(
        (p for p in place.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def flip(place):
    path = largest(place)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "half written": lambda place: (place / "manifest.json").unlink(),
    "manifest.json is damaged": lambda place: (place / "manifest.json").write_text("{"),
    "is damaged: it has other bytes": flip,
    "is missing": lambda place: largest(place).unlink(),
    "was not written with it": lambda place: (place / "state" / "x").write_text(""),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_offered(three, message, tmp_path):
    import shutil

    shutil.copytree(three.folder, tmp_path / "c")
    kept = Checkpoints(tmp_path / "c", keep=3)
    DAMAGES[message](kept.folder / "10")
    with pytest.raises(CheckpointError, match=rf"c/10: .*{message}.* --from 3\."):
        kept.run_of(10)
    assert kept.run_of(3) == {"about": 3}
    DAMAGES[message](kept.folder / "3")
    DAMAGES[message](kept.folder / "2")
    with pytest.raises(CheckpointError, match=r"--from 0 begins anew"):
        kept.run_of(10)
    kept.forget_after(2)
    assert kept.steps() == [2]
