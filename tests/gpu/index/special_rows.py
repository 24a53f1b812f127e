"""Rows that a selection must order: ties, NaN, infinities, signed zeros."""

import numpy as np

INF, NAN = np.inf, np.nan


def special_rows(v, seed=0):
    """Random, few values, all equal, NaN of both signs, infinities, signed zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, v)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = 2.5
    x[3, ::7] = NAN
    x[3, 1::7] = -NAN
    x[4, rng.integers(0, v, 5)] = INF
    x[5] = -INF
    x[5, v // 2] = 0.0
    x[5, v // 3] = -0.0
    x[6] = NAN
    x[6, -1] = -INF
    x[7] = np.sort(x[7])
    return x
