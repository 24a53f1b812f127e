"""The codebooks are optimal: levels are means of their cells, errors as integrated."""

import numpy as np
import pytest
from scipy.stats import norm

from jaxkern import lloyd_max_codebook, lloyd_max_error


def cells(levels):
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    return edges[:-1], edges[1:]


def mean_squared_error(levels):
    """Of a standard normal number, by the integrals of its density over each cell."""
    a, b = cells(np.asarray(levels))
    mass, mean = norm.cdf(b) - norm.cdf(a), norm.pdf(a) - norm.pdf(b)
    return 1 - 2 * levels @ mean + levels**2 @ mass


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_the_means_of_their_cells(bits):
    levels = lloyd_max_codebook(bits)
    assert levels.shape == (2**bits,) and levels.dtype == np.float64
    np.testing.assert_array_equal(levels, -levels[::-1])
    a, b = cells(levels)
    upper = levels > 0  # the tails are accurate there
    mass = norm.sf(a[upper]) - norm.sf(b[upper])
    means = (norm.pdf(a[upper]) - norm.pdf(b[upper])) / mass
    np.testing.assert_allclose(levels[upper], means, rtol=1e-11)


@pytest.mark.parametrize("bits", range(1, 9))
def test_errors_are_those_of_the_levels(bits):
    error = mean_squared_error(lloyd_max_codebook(bits))
    np.testing.assert_allclose(error, lloyd_max_error(bits), rtol=1e-9)


def test_one_and_two_bits_by_hand():
    top = np.sqrt(2 / np.pi)
    np.testing.assert_allclose(lloyd_max_codebook(1), [-top, top])
    np.testing.assert_allclose(lloyd_max_error(1), 1 - 2 / np.pi)
    np.testing.assert_allclose(  # Max 1960, table I
        lloyd_max_codebook(2), [-1.510, -0.4528, 0.4528, 1.510], atol=5e-4
    )


def test_the_wide_tables_are_converged():
    """mlx-native's 8-bit table ends at 5.065 and has an error of 6.27e-5."""
    assert abs(lloyd_max_codebook(8)[-1] - 4.6035356) < 1e-6
    assert lloyd_max_error(8) < 4.12e-5
    assert lloyd_max_error(6) < 6.4425e-4
    for k in range(256):  # no level can move without loss
        for step in (-1e-3, 1e-3):
            moved = lloyd_max_codebook(8) + step * (np.arange(256) == k)
            assert mean_squared_error(moved) > lloyd_max_error(8)


@pytest.mark.parametrize("bits", [0, 9])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match="`bits` must be 1 to 8"):
        lloyd_max_codebook(bits)


def test_a_part_of_a_bit_is_refused():
    with pytest.raises(
        TypeError, match=r"lloyd_max_codebook: `bits` must be int, got 2"
    ):
        lloyd_max_codebook(2.25)
