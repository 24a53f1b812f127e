"""Gaussian splatting: an image of two-dimensional Gaussians, blended front to back.

image = sum over gaussians of transmittance * alpha * color, the rasteriser of
https://arxiv.org/abs/2308.04079 after its projection.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import kernel_primitive

LARGEST_ALPHA = 0.99  # the paper's, appendix C: what is behind never vanishes quite
LEAST_ALPHA = 1 / 255  # less does not change an 8-bit image
LEAST_TRANSMITTANCE = 1e-4  # a pixel that lets less through is finished


@check_arguments
def gaussian_splat(
    means: Float[Array, "gaussian 2"],
    conics: Float[Array, "gaussian 3"],
    colors: Float[Array, "gaussian channel"],
    opacities: Float[Array, " gaussian"],
    depths: Float[Array, " gaussian"] | None = None,
    background: Float[Array, " channel"] | None = None,
    *,
    height: int,
    width: int,
) -> tuple[Float[Array, "height width channel"], Float[Array, "height width"]]:
    """Draws Gaussians in the image plane, nearest first, as 3D Gaussian splatting does.

        alpha_i = min(0.99, opacity_i exp(-(a u^2 + 2 b u v + c v^2) / 2))
        T_i     = prod_{j < i} (1 - alpha_j)
        image   = sum_i T_i alpha_i color_i + T_last background

    at each pixel, with (a, b, c) the conic and (u, v) the pixel's centre less the mean:
    pixel (row, column) has its centre at (column + 0.5, row + 0.5). As in the paper an
    alpha below 1 / 255 counts as 0, and a pixel is finished by the Gaussian that would
    let T fall below 1e-4, which is not drawn. Gradients are those of this function: 0
    where alpha is cut off at 0.99, where the paper's code lets them through.

    Every Gaussian meets every pixel: the work is gaussians * height * width, without
    the tiles of a renderer. Memory is that of the image, in the backward pass too.
    Projecting a scene and the colours of a view are left to the caller. All arithmetic
    in float32 (float64 if an operand is).

    Source: https://arxiv.org/abs/2308.04079.

    Args:
      means: `[gaussian, 2]`, x to the right and y down, in pixels.
      conics: `[gaussian, 3]`, a, b, c of the inverse covariance [[a, b], [b, c]], in
        pixels ** -2; positive definite.
      colors: `[gaussian, channel]`, any number of channels.
      opacities: `[gaussian]`, in [0, 1].
      depths: `[gaussian]`, by which they are sorted, smallest in front, ties in the
        order given; or None if they are sorted already.
      background: `[channel]`, or None for zeros.
      height, width: of the image, in pixels.

    Returns:
      image: `[height, width, channel]`, dtype of colors.
      transmittance: `[height, width]`, dtype of colors; 1 - transmittance is the
        image's own alpha.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: the image has no pixels.

    Example:
      >>> means, conics = jnp.array([[2.0, 2.0]]), jnp.array([[0.5, 0.0, 0.5]])
      >>> one = means, conics, jnp.ones((1, 3)), jnp.array([0.8])  # colours, opacities
      >>> image, transmittance = jaxkern.gaussian_splat(*one, height=4, width=4)
      >>> image.shape, image[1, :, 0]
      ((4, 4, 3), Array([0.428, 0.706, 0.706, 0.428], dtype=float32))
    """
    if height < 1 or width < 1:
        raise ValueError(
            f"gaussian_splat: `height` and `width` must be at least 1, got {height} "
            f"and {width}."
        )
    if depths is not None:
        if jnp.shape(depths) != jnp.shape(opacities):
            raise TypeError(
                f"gaussian_splat: `depths` must have shape {jnp.shape(opacities)}, "
                f"got {jnp.shape(depths)}."
            )
        order = jnp.argsort(lax.stop_gradient(depths))
        means, conics, colors, opacities = (
            jnp.asarray(x)[order] for x in (means, conics, colors, opacities)
        )
    return gaussian_splat_p(
        means, conics, colors, opacities, background, height=height, width=width
    )


def gaussian_splat_fwd_reference(
    means: Float[Array, "gaussian 2"],
    conics: Float[Array, "gaussian 3"],
    colors: Float[Array, "gaussian channel"],
    opacities: Float[Array, " gaussian"],
    background: Float[Array, " channel"] | None,
    *,
    height: int,
    width: int,
) -> tuple[
    Float[Array, "height width channel"],
    Float[Array, "height width"],
    Float[Array, "height width"],
    Int[Array, "height width"],
]:
    gaussians = in_one_dtype(means, conics, colors, opacities)
    color, dtype = gaussians[2], gaussians[2].dtype

    def blend(pixels, gaussian):
        image, through, count, finished = pixels
        alpha = alphas(gaussian, height, width)
        left = through * (1 - alpha)
        finished |= left < LEAST_TRANSMITTANCE
        weight = jnp.where(finished, 0, through * alpha)
        image = image + weight[..., None] * gaussian[2]
        through = jnp.where(finished, through, left)
        return (image, through, count + ~finished, finished), None

    start = (
        jnp.zeros((height, width, color.shape[1]), dtype),
        jnp.ones((height, width), dtype),
        jnp.zeros((height, width), jnp.int32),
        jnp.zeros((height, width), bool),
    )
    start = same_manual_axes([*start, color])[:4]
    (image, through, count, _), _ = lax.scan(blend, tuple(start), gaussians)
    if background is not None:
        image = image + through[..., None] * background.astype(dtype)
    return image.astype(colors.dtype), through.astype(colors.dtype), through, count


gaussian_splat_reference = without_residuals(gaussian_splat_fwd_reference, 2)


def gaussian_splat_bwd_reference(
    means: Float[Array, "gaussian 2"],
    conics: Float[Array, "gaussian 3"],
    colors: Float[Array, "gaussian channel"],
    opacities: Float[Array, " gaussian"],
    background: Float[Array, " channel"] | None,
    through: Float[Array, "height width"],
    count: Int[Array, "height width"],
    dimage: Float[Array, "height width channel"],
    dtransmittance: Float[Array, "height width"],
    *,
    height: int,
    width: int,
) -> tuple[
    Float[Array, "gaussian 2"],
    Float[Array, "gaussian 3"],
    Float[Array, "gaussian channel"],
    Float[Array, " gaussian"],
    Float[Array, " channel"] | None,
]:
    # Back to front. `behind` is what a pixel would show of all behind a Gaussian, times
    # the cotangent; the transmittance counts as a channel over a background of 1.
    gaussians = in_one_dtype(means, conics, colors, opacities)
    dtype = gaussians[2].dtype
    dimage = dimage.astype(dtype)
    behind = dtransmittance.astype(dtype)
    if background is not None:
        behind = behind + dimage @ background.astype(dtype)

    def unblend(pixels, numbered):
        through, behind = pixels
        gaussian, number = numbered
        alpha, pull = jax.vjp(
            functools.partial(alphas, height=height, width=width), gaussian
        )
        alpha = jnp.where(number < count, alpha, 0)  # those drawn are the first ones
        through = through / (1 - alpha)  # at least 0.01
        shown = dimage @ gaussian[2]
        dalpha = jnp.where(number < count, through * (shown - behind), 0)
        dmean, dconic, _, dopacity = pull(dalpha)[0]
        dcolor = jnp.einsum("hw,hwc->c", through * alpha, dimage)
        behind = alpha * shown + (1 - alpha) * behind
        return (through, behind), (dmean, dconic, dcolor, dopacity)

    numbers = jnp.arange(means.shape[0], dtype=jnp.int32)
    _, grads = lax.scan(unblend, (through, behind), (gaussians, numbers), reverse=True)
    dmeans, dconics, dcolors, dopacities = grads
    dbackground = None
    if background is not None:
        dbackground = jnp.einsum("hw,hwc->c", through, dimage).astype(background.dtype)
    return (
        dmeans.astype(means.dtype),
        dconics.astype(conics.dtype),
        dcolors.astype(colors.dtype),
        dopacities.astype(opacities.dtype),
        dbackground,
    )


def in_one_dtype(*operands):
    dtype = jnp.result_type(jnp.float32, *operands)
    return tuple(x.astype(dtype) for x in operands)


def alphas(gaussian, height, width):
    """How much one Gaussian covers of each pixel, `[height width]`."""
    mean, (a, b, c), _, opacity = gaussian
    u = jnp.arange(width, dtype=mean.dtype) + 0.5 - mean[0]
    v = (jnp.arange(height, dtype=mean.dtype) + 0.5 - mean[1])[:, None]
    covered = opacity * jnp.exp(-(a * u * u + 2 * b * u * v + c * v * v) / 2)
    covered = jnp.minimum(covered, LARGEST_ALPHA)
    return jnp.where(covered < LEAST_ALPHA, 0, covered)


gaussian_splat_p = kernel_primitive(
    gaussian_splat_reference,
    fwd=gaussian_splat_fwd_reference,
    bwd=gaussian_splat_bwd_reference,
    # each Gaussian dims those behind it, and the transmittance is no sum over channels
    replicated=("gaussian", "channel"),
)
