"""The soft cap of logits and its slope, for kernels that read them."""

from jaxkern.gpu.triton_call import jit, tl


@jit
def softcapped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), exact to rounding also near 0."""
    u = x / CAP
    e = tl.exp(-2.0 * tl.abs(u))
    far = tl.where(u < 0, e - 1.0, 1.0 - e) / (1.0 + e)
    s = u * u
    near = u - u * s * (1 / 3 - s * (2 / 15 - s * (17 / 315)))
    return CAP * tl.where(s < 0.04, near, far)


@jit
def softcap_slope(x, CAP: tl.constexpr):
    """1 - tanh(x / CAP)**2 without the cancellation."""
    e = tl.exp(-2.0 / CAP * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@jit
def scaled_logits(x, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    z = x.to(tl.float32) * SCALE
    if SOFTCAP is not None:
        z = softcapped(z, SOFTCAP)
    return z
