"""The sum over GPUs through mailboxes: interpreted, and its machine code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import peer_sum
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.gpu.peer_sum import EACH, MOST, NUMBERED, in_turn
from jaxkern.gpu.triton_call import tl
from jaxkern.triton.quant import dense_products
from tests.triton.clusters import numbers
from tests.triton.interpreted import Host, alone, check_in_its_own_process, starts_it

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
shaped = jax.ShapeDtypeStruct
X, RESIDUAL, Y, PART, W = range(5)  # buffers
D = 456  # columns of a product, of 512 at once


def received(first, turn, layout, polls):
    """NaN where a number of that turn is not there yet."""
    total = 0.0
    for k in range(int(numbers(layout[0]))):
        word = tl.load(first + k * MOST)
        number = word.to(tl.int32).to(tl.float32, bitcast=True)
        total += tl.where(word >> 32 == turn, number, float("nan"))
    return total


def sums(n, ranks, residual, product):
    """The launches of a chain of two sums, the second of what a product makes."""
    peers = peer_sum.Peers("x", (tuple(range(ranks)),))
    part, y = shaped((n,), np.float32), shaped((n,), residual or np.float32)
    given = y if residual else None
    total = peer_sum.launch(part, given, y, peers)
    boxes = [(False, -1 - m.number, 0) for m in peer_sum.mailboxes(peers)]
    before = [(False, RESIDUAL, 0)] if residual else []
    first = total, [(False, X, 0), *before, *boxes, (True, Y, 0)]
    then = total, [(True, PART, 0), *before, *boxes, (True, Y, 0)]
    made = product, [(False, X, 0), (False, W, 0), (True, PART, 0)]
    return [first, made, then]


def product_of(n, x_dtype="float32"):
    """Of a matrix `[n, D]` and the first D numbers of x."""
    x, w = shaped((1, D), jnp.dtype(x_dtype)), shaped((n, D), jnp.bfloat16)
    eqn = jax.make_jaxpr(lambda x, w: dense_products.launch(x, w, dtype=np.float32))(
        x, w
    ).eqns[-1]
    return eqn.params["launch"]


@alone
@pytest.mark.parametrize("n, ranks, residual", [(700, 2, "float16"), (513, 3, None)])
def test_all_ranks_have_the_same_sum(n, ranks, residual, monkeypatch):
    """Three turns of a chain; a rank that looked too early is run again."""
    monkeypatch.setattr(peer_sum, "received", received)
    bytes_ = peer_sum.Peers("x", (tuple(range(ranks)),)).mailbox_bytes
    boxes = [np.zeros(bytes_ // 8, np.int64) for _ in range(ranks)]
    for rank, box in enumerate(boxes):
        box[peer_sum.RANK] = rank
    rng = np.random.default_rng(0)
    before = rng.standard_normal(n).astype(residual or np.float32)
    steps = in_turn(sums(n, ranks, residual, product_of(n)))
    assert [dict(s[0].constants).get("LAST") for s in steps] == [False, None, True]

    def run(step, rank, buffers):
        """One launch, to the copies of a rank."""

        def place(own, at, offset):
            if at >= 0:
                return Host(buffers[at])
            box = boxes[rank if at == -1 else -2 - at]
            return Host(box[offset // 8 :])

        launch, sources = step
        rest, pointers = iter(sources), []
        for type_ in launch.operands:
            if isinstance(type_, tuple):
                pointers.append(tuple(place(*next(rest)) for _ in type_))
            else:
                pointers.append(place(*next(rest)))
        constants = dict(launch.constants)
        names = [a for a in launch.kernel.arg_names if a not in constants]
        launch.kernel[launch.grid](
            **dict(zip(names, pointers, strict=True)), **constants
        )

    def made():
        x = rng.standard_normal(n).astype(np.float32)
        w = (rng.integers(-8, 8, (n, D)) / 8).astype(jnp.bfloat16)
        y, part = np.full(n, np.nan, before.dtype), np.zeros(n, np.float32)
        return [x, before, y, part, w]

    added = before if residual else 0
    tolerance = 2e-3 if residual else 1e-5
    for chain in range(3):
        every = [made() for _ in range(ranks)]
        for step in (0, 2):
            for rank, own in enumerate(every):
                if step:
                    run(steps[1], rank, own)
                run(steps[step], rank, own)
                early = own[Y]
                assert rank == ranks - 1 or np.isnan(early).all()
            if step:  # the last sum counted, of which a second run must know nothing
                for box in boxes:
                    assert box[peer_sum.TURNS] == 2 * chain + 2 and not box[2]
                    box[peer_sum.TURNS] -= 2
            for rank, own in enumerate(every):
                run(steps[step], rank, own)
            xs = [x[X].astype(np.float64) for x in every]
            if step:
                xs = [
                    o[W].astype(float) @ x[:D] for x, o in zip(xs, every, strict=True)
                ]
            ys = [o[Y].copy() for o in every]
            want = np.sum(xs, 0) + added
            np.testing.assert_allclose(ys[0], want, rtol=tolerance, atol=1e-4)
            for y in ys[1:]:
                np.testing.assert_array_equal(y, ys[0])
            for own in every:
                own[Y][:] = np.nan


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2)


@starts_it
@pytest.mark.parametrize("residual", [None, "bfloat16"])
def test_nothing_spills_and_all_ends_behind_those_ahead(residual):
    """A sum that sends, a product that does, and the sum of what it sent."""
    n, ranks = 4096, 4
    with compiling_for(90):
        steps = in_turn(sums(n, ranks, residual, product_of(n, "bfloat16")))
        texts = []
        for (launch, _), ahead in zip(steps, (1, 2, 2), strict=True):
            constants = tuple({**dict(launch.constants), "AHEAD": ahead}.items())
            launch = launch._replace(constants=constants)
            assert launch.stack_bytes == 0 and launch.registers <= 96
            texts.append(compiled(launch, 90).asm["ptx"])
    assert [t.count("st.global.wt.b64") for t in texts] == [ranks, ranks, 0]
    looks = [t.count("ld.relaxed.sys.global.b64") for t in texts]
    assert looks == [ranks, 0, ranks]
    assert all(text.count("griddepcontrol.wait") == 1 for text in texts)
    waits = [t.index("griddepcontrol.wait") for t in texts]
    assert waits[0] < texts[0].index("st.global.wt.b64")
    assert waits[1] < texts[1].index("st.global.wt.b64")
    assert waits[2] < texts[2].index("ld.relaxed.sys.global.b64")
    assert EACH == 128 and NUMBERED == 16  # threads of a program; aligned pointers


@starts_it
def test_a_product_sends_behind_the_sum_before_alone():
    """Else it would overwrite what that sum has not yet read."""
    n, ranks = 4096, 2
    product = product_of(n, "bfloat16")
    first, made, then = sums(n, ranks, "bfloat16", product)

    def sent(*steps):
        found = in_turn(steps)
        return [dict(step.constants).get("LAYOUT") is not None for step, _ in found], [
            "x_ptr" in dict(step.constants) for step, _ in found
        ]

    assert sent(first, made, then) == ([True, True, True], [False, False, True])
    assert sent(made, first, then) == ([False, True, True], [False, False, False])
    of_half = product_of(n // 2, "bfloat16")
    smaller = of_half, made[1]
    assert sent(first, smaller, then) == ([True, False, True], [False, False, False])
