"""Discrete Fourier transform: y[k] = sum_j x[j] exp(-2 pi i j k / n).

(https://doi.org/10.1090/S0025-5718-1965-0178586-1)
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Inexact

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive

NORMS = ("none", "backward", "ortho", "forward")
LAYOUTS = ("complex", "split", "interleaved")


@check_arguments
def fft(
    x: Inexact[Array, "..."],
    *,
    inverse: bool = False,
    norm: str = "backward",
    layout: str = "complex",
) -> Inexact[Array, "..."]:
    """Fourier transform along the last dim, of any length n.

        y[k] = scale * sum_j x[j] exp(-+ 2 pi i j k / n)        (+ with inverse)

    | norm       | scale of the transform | of the inverse |
    |------------|------------------------|----------------|
    | "none"     | 1                      | 1              |
    | "backward" | 1                      | 1/n            |
    | "ortho"    | 1/sqrt(n)              | 1/sqrt(n)      |
    | "forward"  | 1/n                    | 1              |

    The last three are NumPy's. Linear: the transpose is the transform the other way
    round with the same scale. Computed in complex64 (complex128 for 64-bit numbers).

    Source: https://doi.org/10.1090/S0025-5718-1965-0178586-1.

    Args:
      x: complex `[..., n]`; with layout="split" real `[..., 2 * n]`, n real parts and
        then n imaginary ones; with layout="interleaved" real `[..., n, 2]`. A real x in
        the layout "complex" has imaginary parts 0.
      inverse: transform back.
      norm: see the table.
      layout: of x and y.

    Returns:
      y: shape and dtype of x; complex for layout "complex".

    Raises:
      TypeError: a shape or dtype does not fit the layout.
      ValueError: an unknown norm or layout.

    Example:
      >>> y = jaxkern.fft(jnp.array([1.0, 0.0, 0.0, 0.0]))
      >>> y.dtype, y.real
      (dtype('complex64'), Array([1., 1., 1., 1.], dtype=float32))
      >>> jaxkern.fft(y, inverse=True).real
      Array([1., 0., 0., 0.], dtype=float32)
    """
    if norm not in NORMS:
        raise ValueError(f"fft: `norm` must be one of {NORMS}, got {norm!r}.")
    real, imaginary = from_layout(jnp.asarray(x), layout)
    real, imaginary = fft_p(real, imaginary, inverse=bool(inverse), norm=norm)
    return to_layout(real, imaginary, layout)


def from_layout(x: Array, layout: str) -> tuple[Array, Array]:
    """Real and imaginary parts `[..., n]`."""
    if layout not in LAYOUTS:
        raise ValueError(f"fft: `layout` must be one of {LAYOUTS}, got {layout!r}.")
    if layout == "complex":
        return x.real, x.imag
    if jnp.iscomplexobj(x):
        raise TypeError(f"fft: `x` must be real for layout {layout!r}, got {x.dtype}.")
    if layout == "interleaved":
        if x.ndim < 2 or x.shape[-1] != 2:
            raise TypeError(f"fft: `x` must be [..., n, 2], got shape {x.shape}.")
        return x[..., 0], x[..., 1]
    if x.ndim < 1 or x.shape[-1] % 2:
        raise TypeError(f"fft: `x` must be [..., 2 * n], got shape {x.shape}.")
    real, imaginary = jnp.split(x, 2, axis=-1)
    return real, imaginary


def to_layout(real: Array, imaginary: Array, layout: str) -> Array:
    if layout == "complex":
        return lax.complex(at_least_f32(real), at_least_f32(imaginary))
    if layout == "interleaved":
        return jnp.stack([real, imaginary], axis=-1)
    return jnp.concatenate([real, imaginary], axis=-1)


def fft_reference(
    real: Float[Array, "... n"],
    imaginary: Float[Array, "... n"],
    *,
    inverse: bool,
    norm: str,
) -> tuple[Float[Array, "... n"], Float[Array, "... n"]]:
    return transform(real, imaginary, inverse, scale(real.shape[-1], inverse, norm))


def fft_bwd_reference(
    dreal: Float[Array, "... n"],
    dimaginary: Float[Array, "... n"],
    *,
    inverse: bool,
    norm: str,
) -> tuple[Float[Array, "... n"], Float[Array, "... n"]]:
    # F = A + iB is symmetric: the transpose of (re, im) -> (A re - B im, B re + A im)
    # is the conjugate of F
    factor = scale(dreal.shape[-1], inverse, norm)
    return transform(dreal, dimaginary, not inverse, factor)


def scale(n: int, inverse: bool, norm: str) -> float:
    n = max(n, 1)
    if norm == "ortho":
        return n**-0.5
    return 1 / n if norm == ("backward" if inverse else "forward") else 1.0


def transform(real, imaginary, inverse, factor):
    """The unscaled transform times a factor; the inverse between two conjugations."""
    n = real.shape[-1]
    if n == 0:
        return real, imaginary
    dtype = jnp.result_type(real, imaginary, jnp.float32)
    sign = -1 if inverse else 1
    x = lax.complex(real.astype(dtype), sign * imaginary.astype(dtype))
    y = lax.platform_dependent(x, cpu=fft_with_layout, default=forward)
    imaginary_part = sign * factor * y.imag
    return (factor * y.real).astype(real.dtype), imaginary_part.astype(imaginary.dtype)


def forward(x):
    return lax.fft(x, lax.FftType.FFT, x.shape[-1:])


def fft_with_layout(x):
    """On CPUs XLA's transform takes the row-major layout only, but does not ask for it.

    Where n was cut, the gather before or the slice after it chose another one: an
    internal error.
    """
    row_major = Layout(major_to_minor=tuple(range(x.ndim)))
    y = forward(with_layout_constraint(x, row_major))
    return with_layout_constraint(y, row_major)


fft_p = kernel_primitive(
    fft_reference,
    bwd=fft_bwd_reference,
    linear=("real", "imaginary"),
    replicated=("n",),  # every result needs all of them
)
