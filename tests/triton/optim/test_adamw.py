"""The kernel of a whole tree: one launch, in place, for every mix of dtypes."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import adamw_update, explain
from jaxkern.gpu import device as block_sizes
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def tree(shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


def update(*state):
    return adamw_update(*state, 3, learning_rate=0.1)


def launches_of(*state):
    [row] = explain(update, *state, platform="cuda").rows
    return row.launches


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_compile_and_fit(capability, dtype):
    shapes = [(), (3, 5), (0, 4), (2048,), (40000,), (7, 11, 13)]
    params, moments = tree(shapes, dtype), tree(shapes)
    with compiling_for(capability):
        [launch] = launches_of(params, params, moments, moments)
        assert compiled(launch, capability).asm["cubin"]
        assert launch.stack_bytes == 0
        assert launch.shared_bytes <= bridge.max_shared_bytes()


def test_300_leaves_are_one_launch():
    shapes = [(1000 + k,) if k % 3 else (32, 1024) for k in range(300)]
    [launch] = launches_of(*[tree(shapes)] * 4)
    # a program reads the pointers of one leaf: with a selection it keeps many
    assert launch.registers <= 64
    assert launch.stack_bytes == 0
    found = sum(dict(launch.constants)["SIZES"])
    assert found == sum(1000 + k if k % 3 else 32768 for k in range(300))


@pytest.mark.parametrize(
    "driver, leaves",
    [
        *((0, 584), (12_000, 72)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((12_010, 584), (13_000, 584), (11_080, 72))
        ),
    ],
)
def test_a_launch_has_the_leaves_whose_pointers_its_driver_passes(
    monkeypatch, driver, leaves
):
    monkeypatch.setattr(block_sizes, "driver_version", lambda: driver)
    launches = launches_of(*[tree([(8 + k,) for k in range(600)])] * 4)
    sizes = [len(dict(x.constants)["SIZES"]) for x in launches]
    full, last = divmod(600, leaves)
    assert sizes == [leaves] * full + [last] * (last > 0)
    most = 4096 if leaves == 72 else 32_764
    assert all(8 * (parameters(x) + 2) <= most for x in launches)  # 2 of Triton
    assert 8 * (parameters(launches[0]) + 2 + 7) > most


def parameters(launch):
    return len(jax.tree.leaves(launch.operands))


def test_kernels_have_two_parameters_more_than_pointers():
    [launch] = launches_of(*[tree([(8,), (9,)])] * 4)
    assert launch.ptx.count(".param .u64") == parameters(launch) + 2


def test_leaves_of_other_dtypes_share_a_launch():
    shapes = [(8,), (), (9, 1000), (0, 3), (5000,)]
    mixed = [
        jax.ShapeDtypeStruct(s, jnp.float32 if k % 2 else jnp.bfloat16)
        for k, s in enumerate(shapes)
    ]
    [launch] = launches_of(mixed, mixed, *[tree(shapes)] * 2)
    constants = dict(launch.constants)
    assert constants["GROUPS"] == ((0, 0, 9), (3, 9, 10))
    assert constants["SIZES"] == (8, 9000, 5000, 1)
    assert launch.stack_bytes == 0


def test_results_lie_in_the_donated_buffers():
    state = [tree([(64,), (8, 8)])] * 4
    traced = jax.jit(update, donate_argnums=(0, 2, 3)).trace(*state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 6
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 6
