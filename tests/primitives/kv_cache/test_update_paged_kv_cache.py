"""update_paged_kv_cache: which token ends in which page, gathering, gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import gather_pages, page_slots, update_kv_cache, update_paged_kv_cache
from jaxkern.testing.checks import bf16, case, f32


def some_slots(b, t, total, outside=0):
    """Distinct slots; the first `outside` of them do not exist."""

    def draw(rng):
        slots = rng.permutation(total)[: b * t].astype(np.int32)
        slots[:outside] = np.array([-1, total, -7, total + 5])[:outside]
        return slots.reshape(b, t)

    return draw


def shapes(n, page, b, t, k, h, outside=0, spec=f32):
    slots = some_slots(b, t, n * page, outside)
    return dict(pages=spec(n, page, k, h), new=spec(b, t, k, h), slots=slots)


CASES = [
    case("plain", **shapes(4, 2, 2, 3, 2, 4, outside=2)),
    case("odd_bf16", **shapes(3, 1, 1, 1, 1, 3, spec=bf16)),
    case("no_tokens", full=True, **shapes(3, 3, 3, 0, 1, 3)),
    case("llama3_8b_decode", full=True, **shapes(64, 16, 4, 1, 8, 128, spec=bf16)),
    case("llama3_8b_prefill", full=True, **shapes(64, 16, 2, 100, 8, 128)),
]


def numbers(*shape, start=0):
    return (np.arange(np.prod(shape), dtype=np.float32) + start).reshape(shape)


def formula(pages, new, slots):
    out = np.array(pages)
    for at in np.ndindex(*slots.shape):
        if 0 <= slots[at] < out.shape[0] * out.shape[1]:
            out[slots[at] // out.shape[1], slots[at] % out.shape[1]] = new[at]
    return out


def test_formula():
    pages, new = numbers(4, 3, 2, 2), numbers(2, 3, 2, 2, start=1000)
    slots = np.array([[7, -1, 0], [11, 12, 3]])
    out = update_paged_kv_cache(*map(jnp.asarray, (pages, new, slots)))
    np.testing.assert_array_equal(out, formula(pages, new, slots))


TABLES = np.array([[5, 2, 0], [1, -1, 3]])  # sequence 1 has no second page


def test_slots():
    slots = page_slots(jnp.asarray(TABLES), jnp.array([3, 2]), 5, 4)
    expected = [[23, 8, 9, 10, 11], [6, 7, -1, -1, -1]]
    np.testing.assert_array_equal(slots, expected)
    counted = page_slots(
        jnp.asarray(TABLES), jnp.array([3, 2]), 5, 4, jnp.array([2, 1])
    )
    np.testing.assert_array_equal(counted, [[23, 8, -1, -1, -1], [6, -1, -1, -1, -1]])
    # before the first and behind the last page
    edges = page_slots(jnp.asarray(TABLES), jnp.array([-1, 10]), 3, 4)
    np.testing.assert_array_equal(edges, [[-1, 20, 21], [14, 15, -1]])
    beyond = jnp.array([[2**28, 2**31 - 1]])  # times 16 they would wrap round to page 0
    assert (page_slots(beyond, jnp.array([0]), 32, 16) == -1).all()
    assert (page_slots(jnp.zeros((2, 0), int), jnp.zeros(2, int), 3, 4) == -1).all()


def test_gather():
    pages = numbers(6, 4, 1, 2, start=1)
    dense = gather_pages(jnp.asarray(pages), jnp.asarray(TABLES))
    expected = np.concatenate([pages[[5, 2, 0]], pages[[1, 1, 3]]]).reshape(2, 12, 1, 2)
    expected[1, 4:8] = 0
    np.testing.assert_array_equal(dense, expected)
    past_the_end = gather_pages(jnp.asarray(pages), jnp.array([[6, 5]]))
    np.testing.assert_array_equal(past_the_end[0, :4], jnp.zeros((4, 1, 2)))
    np.testing.assert_array_equal(past_the_end[0, 4:], pages[5])


def test_pages_hold_what_a_linear_cache_holds():
    """A ragged prefill, then token by token; the pages lie in any order."""
    tables = jnp.array([[5, 2, 0], [1, 4, 3]])
    pages, linear = jnp.zeros((6, 4, 2, 3)), jnp.zeros((2, 12, 2, 3))
    lengths = jnp.zeros(2, jnp.int32)
    for step, (t, counts) in enumerate(
        [(7, (7, 4)), (1, (1, 1)), (1, (1, 0)), (5, (5, 5))]
    ):
        counts = jnp.array(counts)
        new = jnp.asarray(numbers(2, t, 2, 3, start=100 * (step + 1)))
        slots = page_slots(tables, lengths, t, 4, counts)
        pages = update_paged_kv_cache(pages, new, slots)
        linear = update_kv_cache(linear, new, lengths, counts)
        lengths = lengths + counts
        np.testing.assert_array_equal(gather_pages(pages, tables), linear)


def test_gradients_follow_the_tokens():
    pages, new = numbers(2, 2, 1, 1), numbers(1, 3, 1, 1, start=10)
    weights = numbers(2, 2, 1, 1, start=1)

    def loss(pages, new):
        out = update_paged_kv_cache(pages, new, jnp.array([[3, 9, 0]]))
        return jnp.sum(weights * out)

    dpages, dnew = jax.grad(loss, (0, 1))(jnp.asarray(pages), jnp.asarray(new))
    np.testing.assert_array_equal(dpages.ravel(), [0, 2, 3, 0])
    np.testing.assert_array_equal(dnew.ravel(), [4, 0, 1])


def test_dtype_is_that_of_the_pages():
    pages, new = jnp.zeros((1, 2, 1, 1), jnp.float16), jnp.full((1, 1, 1, 1), 1 / 3)

    def f(pages, new):
        return update_paged_kv_cache(pages, new, jnp.array([[1]]))

    out, vjp = jax.vjp(f, pages, new)
    assert out.dtype == jnp.float16 and out[0, 1, 0, 0] == jnp.float16(1 / 3)
    assert [g.dtype for g in vjp(out)] == [jnp.float16, jnp.float32]


def test_donated_pages_are_written_in_place():
    @functools.partial(jax.jit, donate_argnums=0)
    def decode(pages, new, slots):
        def step(i, pages):
            return update_paged_kv_cache(pages, new * i, slots + i)

        return jax.lax.fori_loop(0, 5, step, pages)

    pages = jax.ShapeDtypeStruct((256, 16, 2, 64), jnp.float32)
    new = jax.ShapeDtypeStruct((3, 1, 2, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((3, 1), jnp.int32)
    compiled = decode.lower(pages, new, slots).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 256 * 16 * 2 * 64 * 4
    assert memory.temp_size_in_bytes < 2**16
    assert not re.search(r"f32\[256,16,2,64\]\S* copy\(", compiled.as_text())
