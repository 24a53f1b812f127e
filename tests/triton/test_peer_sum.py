"""The sum over GPUs through mailboxes: interpreted, and its machine code."""

import jax
import numpy as np
import pytest

from jaxkern.gpu import peer_sum
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.gpu.triton_call import tl
from tests.triton.clusters import numbers
from tests.triton.interpreted import Host, alone, check_in_its_own_process, starts_it

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def send(at, x, turn, asked):
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    if numbers(asked).all():
        tl.store(at, bits | (turn << 32))


def receive(at, turn, is_own, polls):
    word = tl.load(at)
    number = word.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where((word >> 32) == turn, number, float("nan"))


@alone
@pytest.mark.parametrize("n, ranks, residual", [(700, 2, True), (513, 3, False)])
def test_all_ranks_have_the_same_sum(n, ranks, residual, monkeypatch):
    """Three turns; a rank that looked too early is run again in the same turn."""
    monkeypatch.setattr(peer_sum, "send", send)
    monkeypatch.setattr(peer_sum, "receive", receive)
    peers = peer_sum.Peers("x", (tuple(range(ranks)),))
    boxes = [np.zeros(peers.mailbox_bytes // 8, np.int64) for _ in range(ranks)]
    for rank, box in enumerate(boxes):
        box[0] = rank
    rng = np.random.default_rng(0)
    before = rng.standard_normal(n).astype(np.float16) if residual else None

    def run(rank, x):
        y = np.full(n, np.nan, np.float16 if residual else np.float32)
        given = jax.ShapeDtypeStruct((n,), np.float16) if residual else None
        launch = peer_sum.launch(x, given, y, peers)
        constants = dict(launch.constants)
        pointers = [Host(x), Host(boxes[rank]), tuple(map(Host, boxes)), Host(y)]
        names = [a for a in launch.kernel.arg_names if a not in constants]
        if before is not None:
            pointers.insert(1, Host(before))
        launch.kernel[launch.grid](
            **dict(zip(names, pointers, strict=True)), **constants
        )
        return y

    for turn in range(3):
        xs = [rng.standard_normal(n).astype(np.float32) for _ in range(ranks)]
        for rank in range(ranks):
            early = run(rank, xs[rank])
            assert rank == ranks - 1 or np.isnan(early).all()
        programs = slice(1, 1 + -(-n // peer_sum.EACH))
        for box in boxes:
            assert (box[programs] == turn + 1).all()
            box[programs] -= 1
        ys = [run(rank, xs[rank]) for rank in range(ranks)]
        want = np.sum(xs, 0, np.float64) + (0 if before is None else before)
        np.testing.assert_allclose(
            ys[0], want, rtol=1e-3 if residual else 1e-5, atol=1e-5
        )
        for y in ys[1:]:
            np.testing.assert_array_equal(y, ys[0])


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2)


@starts_it
@pytest.mark.parametrize("residual", [None, "bfloat16"])
def test_nothing_spills_and_all_ends_behind_those_ahead(residual):
    shaped = jax.ShapeDtypeStruct
    x = shaped((4096,), "float32")
    given = residual and shaped((4096,), residual)
    peers = peer_sum.Peers("x", ((0, 1, 2, 3),))
    with compiling_for(90):
        launch = peer_sum.launch(x, given, given or x, peers)
        launch = launch._replace(
            constants=tuple({**dict(launch.constants), "AHEAD": 1}.items())
        )
        assert launch.stack_bytes == 0 and launch.registers <= 64
        text = compiled(launch, 90).asm["ptx"]
    assert text.count("st.relaxed.sys.global.b64") == 4 * peer_sum.EACH // 128
    assert "griddepcontrol.wait" in text
