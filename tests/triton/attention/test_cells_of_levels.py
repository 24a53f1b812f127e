"""Tables of cells, in which a number's level is looked up."""

import numpy as np
import pytest

from jaxkern import TurboQuantCodec
from jaxkern.triton.turboquant.cache_codes import cells_of, midpoints_of


@pytest.mark.parametrize(
    "codec",
    [
        *(TurboQuantCodec(bits) for bits in range(3, 9)),
        TurboQuantCodec(3, codebook=(-3.0, 0.25, 0.5, 3.0, 4.0, 5.0, 6.0, 900.0)),
    ],
    ids=str,
)
def test_a_cell_has_the_level_that_bisection_finds(codec):
    midpoints = midpoints_of(codec)
    per, first, count, table = cells_of(midpoints)
    x = np.array(midpoints, np.float32)
    rng = np.random.default_rng(0)
    z = np.concatenate(
        [
            *(np.nextafter(x, x + step, dtype=np.float32) for step in (-1, 0, 1)),
            np.float32(rng.standard_normal(10_000) * 2),
            np.array([-np.inf, -1e30, 1e30, np.inf], np.float32),
        ]
    )
    cell = np.clip(z * np.float32(per) + np.float32(first), 0, count - 1).astype(int)
    found = table[count + cell] + (z > table[cell])
    np.testing.assert_array_equal(found, np.searchsorted(x, z))


def test_levels_too_close_not_ascending_or_few_are_bisected():
    close = TurboQuantCodec(3, codebook=(0.0, 1e-6, 2e-6, 1.0, 2.0, 3.0, 4.0, 5.0))
    for codec in (close, TurboQuantCodec(2.25), TurboQuantCodec(2)):
        midpoints = midpoints_of(codec)
        *_, count, table = cells_of(midpoints)
        assert count == 0
        np.testing.assert_array_equal(table, np.array(midpoints, np.float32))
