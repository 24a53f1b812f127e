"""Rotary frequencies: f_i = theta**(-2i / freq_dim) (https://arxiv.org/abs/2104.09864).

A model that is to read longer texts than it was trained on rescales them; each way to
do so is one small dataclass below, with its formula and source. It maps the frequencies
of the original model (float64) to those it runs with, and has the `magnitude` by which
cos and sin are multiplied.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RopeScaling",
    "YarnScaling",
    "rope_cos_sin",
    "rope_frequencies",
]


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: f / factor (https://arxiv.org/abs/2306.15595).

    Attributes:
      factor: by how much longer a text may be than in training.

    Example:
      >>> jaxkern.rope_frequencies(4, theta=100.0, scaling=jaxkern.LinearScaling(4.0))
      Array([0.25 , 0.025], dtype=float32)
    """

    factor: float
    magnitude: ClassVar[float] = 1.0

    def __call__(self, freqs, *, theta, freq_dim, length):
        del theta, freq_dim, length
        return freqs / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: theta grows with the length L of the text, once L > original_length.

        theta' = theta * (factor * L / original_length - (factor - 1)) ** (d / (d - 2))

    with d = freq_dim, as in Hugging Face's "dynamic" (the formula is by the author of
    "Dynamically Scaled RoPE", 2023; section 3.3 of https://arxiv.org/abs/2309.00071).
    L is `length`, else the highest position + 1 of each sequence, so keys that were
    cached while L was smaller keep their smaller theta.

    Attributes:
      factor: see the formula.
      original_length: of the texts in training, in tokens.

    Example:
      >>> scaling = jaxkern.DynamicScaling(factor=4.0, original_length=8)
      >>> lengths = jnp.array([8, 16])
      >>> jaxkern.rope_frequencies(4, scaling=scaling, length=lengths)
      Array([[1.   , 0.01 ],
             [1.   , 0.002]], dtype=float32)
    """

    factor: float
    original_length: int
    magnitude: ClassVar[float] = 1.0

    def __call__(self, freqs, *, theta, freq_dim, length):
        del theta  # theta'**(-2i/d) = f_i * growth**(-2i/(d-2))
        length = jnp.maximum(jnp.float32(length), self.original_length)[..., None]
        growth = self.factor * length / self.original_length - (self.factor - 1)
        i = np.arange(len(freqs), dtype=np.float32)
        return freqs.astype(np.float32) * growth ** (-2 * i / max(freq_dim - 2, 1))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, a ramp between.

        turns  = original_length * f / (2 pi)         (how often the pair turns round)
        smooth = clip((turns - low) / (high - low), 0, 1)      low = low_freq_factor ...
        f'     = (1 - smooth) * f / factor + smooth * f

    Source: https://github.com/meta-llama/llama-models, `apply_scaling`.

    Attributes:
      factor: by which the long waves are slowed.
      low_freq_factor, high_freq_factor: turns at which the ramp begins and ends.
      original_length: of the texts in training, in tokens.

    Example:
      >>> scaling = jaxkern.Llama3Scaling(8.0, 1.0, 4.0, original_length=8192)
      >>> scaled = jaxkern.rope_frequencies(8, theta=5e5, scaling=scaling)
      >>> scaled / jaxkern.rope_frequencies(8, theta=5e5)
      Array([1.   , 1.   , 0.371, 0.125], dtype=float32)
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    magnitude: ClassVar[float] = 1.0

    def __call__(self, freqs, *, theta, freq_dim, length):
        del theta, freq_dim, length
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_length * freqs / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - smooth) * freqs / self.factor + smooth * freqs


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolate the slow pairs, keep the fast ones (https://arxiv.org/abs/2309.00071).

        pair(turns) = freq_dim * ln(original_length / (2 pi turns)) / (2 ln theta)
        low, high   = pair(beta_fast), pair(beta_slow)
        ramp_i      = clip((i - low) / (high - low), 0, 1)
        f'          = ramp * f / factor + (1 - ramp) * f

    cos and sin are multiplied by `attention_factor`, by default 0.1 ln(factor) + 1 or,
    with both of DeepSeek's mscale numbers, (0.1 mscale ln(factor) + 1) / (0.1
    mscale_all_dim ln(factor) + 1). `truncate` rounds the ends of the ramp outwards to
    whole pairs as in Hugging Face and llama.cpp (gpt-oss: False).

    Attributes:
      factor: by which the slow pairs are interpolated.
      original_length: of the texts in training, in tokens.
      beta_fast, beta_slow: turns over original_length at the ends of the ramp.
      truncate, mscale, mscale_all_dim, attention_factor: see above.

    Example:
      >>> scaling = jaxkern.YarnScaling(factor=4.0, original_length=4096)
      >>> jaxkern.rope_frequencies(8, scaling=scaling) / jaxkern.rope_frequencies(8)
      Array([1.   , 1.   , 0.625, 0.25 ], dtype=float32)
      >>> round(scaling.magnitude, 3)  # multiplies cos and sin
      1.139
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        def grown(mscale):
            return 1 + 0.1 * mscale * math.log(max(self.factor, 1.0))

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def __call__(self, freqs, *, theta, freq_dim, length):
        del length

        def pair(turns):
            wave = self.original_length / (2 * math.pi * turns)
            return freq_dim * math.log(wave) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, freq_dim - 1)
        width = high - low if high != low else 0.001  # as Hugging Face: a step, not 0/0
        ramp = np.clip((np.arange(len(freqs)) - low) / width, 0, 1)
        return ramp * freqs / self.factor + (1 - ramp) * freqs


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: one searched factor per pair, f_i / factor_i (https://arxiv.org/abs/2402.13753).

    The long factors hold where the text is longer than original_length (Hugging Face's
    and Phi-3's rule), the short ones elsewhere; `length` as in DynamicScaling. cos and
    sin are multiplied by `attention_factor`, by default sqrt(1 + ln(factor) /
    ln(original_length)) with factor = (longest supported length) / original_length.

    Attributes:
      short_factor, long_factor: one per rotated pair.
      original_length: of the texts in training, in tokens.
      factor, attention_factor: see above.

    Example:
      >>> scaling = jaxkern.LongRopeScaling((1.0, 1.0), (2.0, 4.0), original_length=8)
      >>> lengths = jnp.array([8, 9])
      >>> jaxkern.rope_frequencies(4, theta=100.0, scaling=scaling, length=lengths)
      Array([[1.   , 0.1  ],
             [0.5  , 0.025]], dtype=float32)
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = math.log(max(self.factor, 1.0)) / math.log(self.original_length)
        return math.sqrt(1 + stretch)

    def __call__(self, freqs, *, theta, freq_dim, length):
        del theta, freq_dim
        if {len(self.short_factor), len(self.long_factor)} != {len(freqs)}:
            raise ValueError(
                f"rope: LongRopeScaling has {len(self.short_factor)} short and "
                f"{len(self.long_factor)} long factors for {len(freqs)} pairs. "
                "Give one of each per rotated pair (rotary_dim / 2)."
            )
        is_long = jnp.asarray(length)[..., None] > self.original_length
        short, long = (
            (freqs / np.asarray(f)).astype(np.float32)
            for f in (self.short_factor, self.long_factor)
        )
        return jnp.where(is_long, long, short)


RopeScaling = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling
)


@check_arguments
def rope_frequencies(
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    freq_dim: int | None = None,
    scaling: RopeScaling | None = None,
    frequency_factors: Float[Array, " r"] | None = None,
    length: int | Int[Array, "..."] = 0,
) -> Float[Array, "... r"]:
    """Angle per position of each of the r = rotary_dim / 2 pairs, in radians.

        f_i = theta**(-2i / freq_dim), then scaled, then divided by frequency_factors[i]

    Source: https://arxiv.org/abs/2104.09864.

    Args:
      rotary_dim: how many of the head's dims rotate; even.
      theta: the base.
      freq_dim: denominator of the exponent; rotary_dim unless given.
      scaling: one of the dataclasses of this file, or None.
      frequency_factors: `[r]`, divisors of the frequencies (GGUF's `rope_freqs.weight`,
        where 1e30 switches a pair off).
      length: length of the text, static or traced; only DynamicScaling and
        LongRopeScaling read it.

    Returns:
      `[r]` in float32, or `[..., r]` for a `length` of shape `[...]` that is read. What
      is static is computed in float64 and rounded once.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: rotary_dim is odd, or theta or scaling not positive.

    Example:
      >>> jaxkern.rope_frequencies(4, theta=100.0)
      Array([1. , 0.1], dtype=float32)
    """
    if rotary_dim % 2 or rotary_dim < 0:
        raise ValueError(f"rope: rotary_dim {rotary_dim} is not even. It counts dims.")
    named = {"theta": theta, **(vars(scaling) if scaling else {})}
    for name in ("theta", "factor", "original_length"):
        value = named.get(name, 1)
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise ValueError(f"rope: `{name}` must be positive, got {value}.")
    freq_dim = rotary_dim if freq_dim is None else freq_dim
    pairs = rotary_dim // 2
    freqs = theta ** (-2 * np.arange(pairs) / max(freq_dim, 1))
    if scaling is not None:
        freqs = scaling(freqs, theta=theta, freq_dim=freq_dim, length=length)
    freqs = jnp.asarray(freqs, jnp.float32)
    if frequency_factors is not None:
        if frequency_factors.shape != (pairs,):
            raise TypeError(
                f"rope: `frequency_factors` must have shape ({pairs},), one per "
                f"rotated pair, got {frequency_factors.shape}."
            )
        freqs = freqs / frequency_factors.astype(jnp.float32)
    return freqs


@check_arguments
def rope_cos_sin(
    positions: Int[Array, "... t"],
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    freq_dim: int | None = None,
    scaling: RopeScaling | None = None,
    frequency_factors: Float[Array, " r"] | None = None,
    length: int | Int[Array, "..."] | None = None,
) -> tuple[Float[Array, "... t r"], Float[Array, "... t r"]]:
    """The tables of apply_rope: cos and sin of positions * rope_frequencies.

        cos = m cos(p f_i),  sin = m sin(p f_i)        with m = scaling.magnitude, or 1

    Compute them once per step and share them between layers. Angles are float32, as the
    models were trained: at position p they are off by up to p * 2**-24 radians.

    Args:
      positions: `[..., t]` int, may be traced and differ between sequences.
      rotary_dim, theta, freq_dim, scaling, frequency_factors: see rope_frequencies.
      length: `[...]` or a number: length of each text. Default: its highest position +
        1.

    Returns:
      cos, sin: `[..., t, r]` float32, r = rotary_dim / 2.

    Raises:
      TypeError: positions are a scalar, or a shape or dtype does not fit.
      ValueError: rotary_dim is odd, or theta or scaling not positive.

    Example:
      >>> cos, sin = jaxkern.rope_cos_sin(jnp.array([0, 1, 2]), 4)
      >>> cos
      Array([[ 1.   ,  1.   ],
             [ 0.54 ,  1.   ],
             [-0.416,  1.   ]], dtype=float32)
    """
    positions = jnp.asarray(positions)
    if positions.ndim < 1:
        raise TypeError(
            "rope: `positions` must have dims [... t], got a scalar. Pass [position]."
        )
    reads_length = isinstance(scaling, DynamicScaling | LongRopeScaling)
    if length is None and reads_length:
        length = jnp.max(positions, axis=-1, initial=0) + 1
    freqs = rope_frequencies(
        rotary_dim,
        theta=theta,
        freq_dim=freq_dim,
        scaling=scaling,
        frequency_factors=frequency_factors,
        length=0 if length is None else length,
    )
    # freqs are [r], or [..., r] where they depend on the length of each sequence
    freqs = freqs[..., None, :]
    angle = positions.astype(jnp.float32)[..., None] * freqs  # [..., t, r]
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude
