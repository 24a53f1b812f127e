"""The kernel of a whole tree: few launches, in place, for every mix of dtypes."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import adamw_update, explain
from jaxkern.triton import triton_call as bridge
from jaxkern.triton.triton_call import compiled, compiling_for

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


def test_300_leaves_are_5_launches_which_4096_bytes_of_pointers_serve():
    shapes = [(1000 + k,) if k % 3 else (32, 1024) for k in range(300)]
    launches = launches_of(*[tree(shapes)] * 4)
    assert len(launches) == 5
    assert all(8 * len(jax.tree.leaves(x.operands)) <= 3700 for x in launches)
    # a program reads the pointers of one leaf: with a selection it keeps many
    assert launches[0].registers <= 64
    found = sum(sum(dict(x.constants)["SIZES"]) for x in launches)
    assert found == sum(1000 + k if k % 3 else 32768 for k in range(300))


def test_leaves_of_other_dtypes_have_a_launch_of_their_own():
    mixed = [*tree([(8,), (9,)]), *tree([(8,)], jnp.bfloat16)]
    assert len(launches_of(mixed, mixed, *[tree([(8,), (9,), (8,)])] * 2)) == 2


def test_results_lie_in_the_donated_buffers():
    state = [tree([(64,), (8, 8)])] * 4
    traced = jax.jit(update, donate_argnums=(0, 2, 3)).trace(*state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 6
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 6
