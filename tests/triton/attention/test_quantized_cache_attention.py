"""The row of decode over quantised caches without a GPU: refusals, tables, sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    Float8Codec,
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    explain,
    quantized_cache_attention,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.turboquant.vector_codec import decode_levels, pack, planes
from jaxkern.triton.attention.quantized_cache_attention.formats import (
    form_of,
    tables_of,
)
from jaxkern.triton.attention.quantized_cache_attention.layouts import (
    copies_of,
    planes_of,
)
from jaxkern.triton.attention.quantized_cache_attention.levels import (
    key_levels,
    value_levels,
)
from tests.triton import ptx

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
TURBO8, TURBO4, INT4 = TurboQuantCodec(8), TurboQuantCodec(4), IntCodec(4, group=32)
OTHER8 = TurboQuantCodec(8, codebook=tuple(float(i) for i in range(256)))


def cache(shape, codec):
    if codec is None:
        return jnp.zeros(shape, jnp.bfloat16)
    return QuantizedVectors.zeros(shape, codec)


def explained(key_codec, value_codec, b=1, t=1, s=40, k=2, g=1, h=128, **options):
    query = jnp.zeros((b, t, k * g, h), jnp.bfloat16)
    key, value = (cache((b, s, k, h), c) for c in (key_codec, value_codec))
    f = lambda *x: quantized_cache_attention(*x, **options)  # noqa: E731
    return explain(f, query, key, value, platform="cuda")


def launches_of(*args, **options):
    launches = [y for row in explained(*args, **options).rows for y in row.launches]
    return [y for y in launches if "decode" in y.name or "merge" in y.name]


@pytest.mark.parametrize(
    "codecs, options, reason",
    [
        ((TURBO4, TURBO4), dict(t=9), "9 queries, more than 8"),
        ((TurboQuantCodec(2.25),) * 2, dict(h=64), "`key` has vectors of 18 bytes"),
        ((INT4, IntCodec(8, group=24)), dict(h=96), "scales of 24 dims each"),
        ((IntCodec(8),) * 2, dict(h=320), "`key` has head dim 320, above 256"),
        ((TURBO4, TURBO4), dict(mask=jnp.ones((1, 40), bool)), "`mask` is not in"),
        ((TURBO4, TURBO4), dict(s=0), "`key_codes` is empty"),
    ],
)
def test_refusals_in_words(codecs, options, reason):
    text = str(explained(*codecs, **options))
    assert reason in text and "quantized_decode_kernel" not in text


LOOKED_UP = [
    *(TurboQuantCodec(bits) for bits in (1, 2, 2.25, 3, 4, 5, 6, 7, 8)),
    *(IntCodec(bits) for bits in (2, 3, 5, 6, 7)),
    Float8Codec(),
]


@pytest.mark.parametrize("codec", LOOKED_UP, ids=str)
def test_lookups_give_the_levels_that_codes_mean(codec):
    """The kernel's PTX of words of a key and of two values, in lanes that have them."""
    rng = np.random.default_rng(0)
    with compiling_for(80):  # later GPUs convert float8 themselves
        form = form_of(codec)
        table, other = tables_of(codec, codec)
        separate, theirs = tables_of(
            codec, TurboQuantCodec(3 if codec.bits != 3 else 4)
        )
    assert table is not None and other is None and theirs is not None
    np.testing.assert_array_equal(table, separate)
    width, together, others = form.width, form.together, planes_of(form)
    count, d = 32 // width, 128
    num_words = d // count
    noise = rng.integers(0, 2**32, (table.size, 64), np.uint32)
    codes = rng.integers(0, 2**8, (2, d)).astype(np.uint8)
    packed = pack(jnp.asarray(codes), planes(codec, d))
    levels = np.asarray(decode_levels("test", packed, 1, codec, jnp.float32))
    levels = levels.reshape(2, num_words, count).astype(np.float16)
    packed = np.pad(packed, ((0, 0), (0, d // 8)))  # zeros behind the last plane

    def words(token, i):
        """The i-th one, and what other planes have for it below others' bits."""
        plane = packed[token, : d * width // 8].view(np.uint32)
        found, start = [int(plane[i])], d * width // 8
        for behind in others:
            size = 4 * behind // width
            own = packed[token, start + size * i : start + size * (i + 1)]
            above = int(rng.integers(0, 2 ** (32 - 8 * size))) << 8 * size
            found.append(int.from_bytes(own.tobytes(), "little") | above)
            start += d * behind // 8
        return found

    def run(text, lane, results, operands):
        inputs = {f"${results + i}": x for i, x in enumerate(operands)}
        shared = noise.copy()
        shared[:, 32 + lane] = table.view(np.uint32)
        shared = shared.reshape(-1).view(np.uint8)
        after = ptx.run(text, inputs | {"%laneid": lane}, shared)
        size = np.uint32 if together == 2 else np.uint16
        return np.array([after[f"${i}"] for i in range(results)], size)

    for i in range(num_words):
        lane = 12 + 4 * i // num_words  # of the four that have a key
        (main, *behind), (second, *beside) = words(0, i), words(1, i)
        y = run(key_levels(form), lane, count // together, [main, 128, *behind])
        np.testing.assert_array_equal(y.view(np.float16), levels[0, i])
        both = [x for pair in zip(behind, beside, strict=True) for x in pair]
        operands = [main, second, 128, *both]
        lane = 8 * i // num_words * 4 + 1  # of the eight that have a value
        y = run(value_levels(form), lane, 2 * count // together, operands)
        np.testing.assert_array_equal(y.view(np.float16), levels[:, i].T.reshape(-1))


FORMS = {
    "turbo4": (TURBO4, TURBO4, {}),
    "int8": (IntCodec(8), IntCodec(8), dict(s=5000, g=4)),
    "float8": (Float8Codec(), Float8Codec(), dict(s=5000, g=4)),
    "int4 by 32": (INT4, INT4, dict(s=5000, g=4, causal=True, t=8)),
    "turbo8 turbo4": (TURBO8, TURBO4, dict(s=5000, softcap=3.0)),
    "turbo8 other": (TURBO8, OTHER8, dict(s=5000)),
    "turbo3": (TurboQuantCodec(3), TurboQuantCodec(3), dict(h=256)),
    "turbo2.25": (TurboQuantCodec(2.25), TurboQuantCodec(2.25), {}),
    "turbo7": (TurboQuantCodec(7), TurboQuantCodec(7), dict(s=5000, g=4)),
    "turbo1": (TurboQuantCodec(1), TurboQuantCodec(1), dict(h=32)),
    "int5 by 32": (IntCodec(5, group=32), IntCodec(5, group=32), dict(h=96, g=4)),
    "int8 of 192": (IntCodec(8), IntCodec(8), dict(h=192, s=5000, g=4)),
    "int6 none": (IntCodec(6), None, dict(g=3, causal=True, window=7, t=2)),
    "none turbo8": (None, TURBO8, dict(k=3, g=2)),
    "narrow": (None, IntCodec(8), dict(h=8)),
}
DEFAULT = ("turbo4", "narrow")


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(x, id=n, marks=[] if n in DEFAULT else [pytest.mark.full])
        for n, x in FORMS.items()
    ],
)
def test_kernels_compile_and_do_not_spill(form, capability):
    *codecs, options = form
    with compiling_for(capability):
        launches = launches_of(*codecs, **options)
        assert launches[0].name == "quantized_decode_kernel"
        for launch in launches:
            assert launch.stack_bytes == 0, launch.describe()
            assert launch.shared_bytes <= bridge.max_shared_bytes()
            if "q" in launch.name:
                problem = dict(launch.constants)["P"]
                parts = problem.parts
                wide = any(p.room and copies_of(p, 16)[0] == 16 for p in parts)
                assert "HMMA" in launch.sass and "LDGSTS.E" in launch.sass
                assert wide == ("LDGSTS.E.BYPASS.LTC256B.128" in launch.sass)
                # Triton has put nothing of its own beside what is addressed in PTX
                assert launch.shared_bytes == problem.shared


def test_a_vmap_of_sequences_is_one_launch():
    query = jnp.zeros((5, 1, 1, 2, 128), jnp.bfloat16)
    key = QuantizedVectors.zeros((5, 1, 30, 2, 128), IntCodec(8))
    f = jax.vmap(quantized_cache_attention)
    [row] = explain(f, query, key, key, platform="cuda").rows
    [launch] = row.launches
    assert launch.grid == (5,)
