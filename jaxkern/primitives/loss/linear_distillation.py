"""Divergence of a student's next-token distribution from a teacher's, without logits.

By blocks of the vocabulary, as in https://arxiv.org/abs/2410.10989; the divergences are
those of https://arxiv.org/abs/2306.13649.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.loss.class_blocks import (
    blocks_of,
    logits_dtype,
    logits_of,
    rows_at,
)
from jaxkern.primitives.loss.cross_entropy import log_sum_exp

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")


@check_arguments
def linear_distillation(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    teacher_x: Float[Array, "... e"],
    teacher_weight: Float[Array, "v e"],
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    block_size: int | None = None,
) -> Float[Array, "..."]:
    """How far a student's softmax is from a teacher's, one number per token.

        q = softmax(x weight^T / temperature)
        p = softmax(teacher_x teacher_weight^T / temperature)
        forward_kl       sum_j p_j ln(p_j / q_j)
        reverse_kl       sum_j q_j ln(q_j / p_j)
        jensen_shannon   beta KL(p || m) + (1 - beta) KL(q || m)
                         with m = beta p + (1 - beta) q

    Both logits are made and used block by block: the largest arrays in memory are two
    of `[..., block_size]` float32, forward and backward, beside the gradients. The
    logits of a block are computed once forward (twice for jensen_shannon, whose terms
    need both sums first) and once backward. Sums in float32 (float64 for float64
    operands). The gradient of the student's logits is

        forward_kl       (q - p) / temperature
        reverse_kl       q (ln(q / p) - KL(q || p)) / temperature
        jensen_shannon   (1 - beta) q (ln(q / m) - KL(q || m)) / temperature

    and the teacher's, computed only where it is asked for, the same with p and q, beta
    and 1 - beta exchanged. With a temperature T multiply by T**2 to keep the size of
    the gradient (https://arxiv.org/abs/1503.02531).

    Args:
      x: `[..., d]`, the student's last hidden states, any float dtype.
      weight: `[v, d]`, its output embedding.
      teacher_x: `[..., e]`, the teacher's hidden states of the same tokens.
      teacher_weight: `[v, e]`, its output embedding over the same vocabulary.
      divergence: "forward_kl", "reverse_kl" or "jensen_shannon".
      beta: the teacher's share in m, within (0, 1); of jensen_shannon only.
      temperature: divides both logits, positive.
      block_size: how many classes at once; None as in `linear_cross_entropy`.

    Returns:
      loss: `[...]`, float32, at least 0 up to rounding. Weigh and sum it as you like.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range.

    Example:
      >>> x = jnp.array([[1.0, 0.0]])
      >>> weight = jnp.array([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
      >>> teacher = 2 * weight  # surer of the same order
      >>> jaxkern.linear_distillation(x, weight, x, teacher)
      Array([0.116], dtype=float32)
      >>> jaxkern.linear_distillation(x, weight, x, teacher, divergence="reverse_kl")
      Array([0.16], dtype=float32)
    """
    op = "linear_distillation"
    if divergence not in DIVERGENCES:
        raise ValueError(
            f"{op}: `divergence` must be one of {', '.join(DIVERGENCES)}, got "
            f"{divergence!r}."
        )
    if not 0 < beta < 1:
        raise ValueError(
            f"{op}: `beta` must lie within (0, 1), got {beta}. At 0 and 1 it is "
            "forward_kl and reverse_kl, times 0."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"{op}: `temperature` must be positive and finite, got {temperature}."
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"{op}: `block_size` must be at least 1, got {block_size}.")
    return linear_distillation_p(
        x,
        weight,
        teacher_x,
        teacher_weight,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        block_size=block_size,
    )


def linear_distillation_fwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    teacher_x: Float[Array, "... e"],
    teacher_weight: Float[Array, "v e"],
    *,
    divergence: str,
    beta: float,
    temperature: float,
    block_size: int | None,
) -> tuple[
    Float[Array, "..."], Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]
]:
    """The loss, lse of student and teacher, and KL(q || m) of jensen_shannon."""
    operands = (x, weight, teacher_x, teacher_weight)
    starts, block = blocks_of(math.prod(x.shape[:-1]), weight, block_size)

    def sums_of_block(sums, start):
        q_lse, p_lse, mean = sums
        q_z, p_z, fresh = logits_at(*operands, start, block, temperature)
        q_new, p_new = with_block(q_lse, q_z, fresh), with_block(p_lse, p_z, fresh)
        if divergence == "forward_kl":
            mean = mean_with_block(mean, p_lse, p_new, p_z, p_z - q_z, fresh)
        elif divergence == "reverse_kl":
            mean = mean_with_block(mean, q_lse, q_new, q_z, q_z - p_z, fresh)
        return (q_new, p_new, mean), None

    dtype = jnp.promote_types(*(logits_dtype(*operands[i : i + 2]) for i in (0, 2)))
    zero = jnp.sum(jnp.zeros_like(x, dtype), axis=-1)  # sharded as the tokens
    zero, *_ = same_manual_axes([zero, *operands])
    none = zero - jnp.inf
    (q_lse, p_lse, mean), _ = lax.scan(sums_of_block, (none, none, zero), starts)
    # mean and difference nearly cancel where the two are alike: subtract them last
    if divergence == "forward_kl":
        return mean - (p_lse - q_lse), q_lse, p_lse, zero
    if divergence == "reverse_kl":
        return mean - (q_lse - p_lse), q_lse, p_lse, zero

    def divergences_of_block(sums, start):
        q_kl, p_kl = sums
        q_z, p_z, fresh = logits_at(*operands, start, block, temperature)
        log_q, log_p = q_z - q_lse[..., None], p_z - p_lse[..., None]
        log_m = log_mixture(log_p, log_q, beta)
        q_term = jnp.exp(log_q) * (log_q - log_m)
        p_term = jnp.exp(log_p) * (log_p - log_m)
        q_kl = q_kl + jnp.sum(jnp.where(fresh, q_term, 0), axis=-1)
        p_kl = p_kl + jnp.sum(jnp.where(fresh, p_term, 0), axis=-1)
        return (q_kl, p_kl), None

    (q_kl, p_kl), _ = lax.scan(divergences_of_block, (zero, zero), starts)
    return beta * p_kl + (1 - beta) * q_kl, q_lse, p_lse, q_kl


linear_distillation_reference = without_residuals(linear_distillation_fwd_reference)


def linear_distillation_bwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    teacher_x: Float[Array, "... e"],
    teacher_weight: Float[Array, "v e"],
    loss: Float[Array, "..."],
    q_lse: Float[Array, "..."],
    p_lse: Float[Array, "..."],
    q_kl: Float[Array, "..."],
    dloss: Float[Array, "..."],
    *,
    divergence: str,
    beta: float,
    temperature: float,
    block_size: int | None,
    wanted: tuple[bool, ...] = (True,) * 4,
) -> tuple[
    Float[Array, "... d"] | None,
    Float[Array, "v d"] | None,
    Float[Array, "... e"] | None,
    Float[Array, "v e"] | None,
]:
    operands = (x, weight, teacher_x, teacher_weight)
    starts, block = blocks_of(math.prod(x.shape[:-1]), weight, block_size)
    slope = (dloss / temperature)[..., None]
    sides = [i for i in (0, 2) if any(wanted[i : i + 2])]  # the student, the teacher

    def step(gradients, start):
        q_z, p_z, fresh = logits_at(*operands, start, block, temperature)
        dz = logits_gradients(
            q_z - q_lse[..., None],
            p_z - p_lse[..., None],
            loss[..., None],
            q_kl[..., None],
            divergence,
            beta,
        )
        new = list(gradients)
        for i in sides:
            dlogits = jnp.where(fresh, slope * dz[i // 2], 0)
            rows, _, _ = rows_at(operands[i + 1], start, block)
            if wanted[i]:
                new[i] += jnp.einsum("...v,vd->...d", dlogits, at_least_f32(rows))
            if wanted[i + 1]:
                new[i + 1] = with_rows(new[i + 1], dlogits, operands[i], start, fresh)
        return tuple(new), None

    zeros = [
        jnp.zeros_like(
            a, jnp.promote_types(a.dtype, loss.dtype) if i % 2 == 0 else None
        )
        if w
        else jnp.zeros((), loss.dtype)
        for i, (a, w) in enumerate(zip(operands, wanted, strict=True))
    ]
    zeros = tuple(same_manual_axes([*zeros, *operands, dloss])[:4])
    gradients, _ = lax.scan(step, zeros, starts)
    dx, dweight, dteacher_x, dteacher_weight = (
        g.astype(a.dtype) if w else None
        for g, a, w in zip(gradients, operands, wanted, strict=True)
    )
    return dx, dweight, dteacher_x, dteacher_weight


def logits_at(x, weight, teacher_x, teacher_weight, start, block, temperature):
    """Both logits of a block of classes, and which of them no earlier block had."""
    rows, _, fresh = rows_at(weight, start, block)
    teacher_rows, _, _ = rows_at(teacher_weight, start, block)
    q_z, p_z = logits_of(x, rows), logits_of(teacher_x, teacher_rows)
    dtype = jnp.promote_types(q_z.dtype, p_z.dtype)
    return q_z.astype(dtype) / temperature, p_z.astype(dtype) / temperature, fresh


def with_block(lse, z, fresh):
    """ln(sum(exp)) with the classes of another block."""
    in_block = log_sum_exp(jnp.where(fresh, z, -jnp.inf))
    return log_sum_exp(jnp.stack([lse, in_block], axis=-1))


def mean_with_block(mean, old_lse, lse, z, values, fresh):
    """The mean of `values` under softmax(z), with the classes of another block."""
    share = jnp.where(fresh, jnp.exp(z - lse[..., None]), 0)
    return mean * jnp.exp(old_lse - lse) + jnp.sum(share * values, axis=-1)


def log_mixture(log_p, log_q, beta):
    """ln(beta p + (1 - beta) q)."""
    return jnp.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def logits_gradients(log_q, log_p, loss, q_kl, divergence, beta):
    """Gradients of the loss for the logits of student and teacher, by temperature."""
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if divergence == "forward_kl":
        return q - p, p * (log_p - log_q - loss)
    if divergence == "reverse_kl":
        return q * (log_q - log_p - loss), p - q
    log_m = log_mixture(log_p, log_q, beta)
    p_kl = (loss - (1 - beta) * q_kl) / beta
    return (1 - beta) * q * (log_q - log_m - q_kl), beta * p * (log_p - log_m - p_kl)


def with_rows(dweight, dlogits, x, start, fresh):
    """`dweight` with the gradient of the rows of one block."""
    new = jnp.einsum(
        "...v,...d->vd",
        dlogits,
        at_least_f32(x),
        out_sharding=explicit_spec(None, None),
    )
    block = fresh.shape[0]
    first = jnp.minimum(start, dweight.shape[0] - block)
    old = lax.dynamic_slice_in_dim(dweight, first, block)
    new = jnp.where(fresh[:, None], new.astype(dweight.dtype), old)
    return lax.dynamic_update_slice_in_dim(dweight, new, first, 0)


linear_distillation_p = kernel_primitive(
    linear_distillation_reference,
    fwd=linear_distillation_fwd_reference,
    bwd=linear_distillation_bwd_reference,
    replicated=("v", "d", "e"),  # each token needs every class
)
