"""Adam with decoupled weight decay  (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101)."""

import math
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.leafwise_primitive import leafwise_primitive


@check_arguments
def adamw_update(
    params: Any,
    grads: Any,
    m: Any,
    v: Any,
    step: int | Integer[Array, ""],
    *,
    learning_rate: float | Float[Array, ""],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    grad_scale: float | Float[Array, ""] | None = None,
    copy: Any = None,
) -> tuple[Any, ...]:
    """One step of AdamW (https://arxiv.org/abs/1711.05101) on a whole pytree.

        m <- b1 m + (1 - b1) g,      v <- b2 v + (1 - b2) g**2
        m' = m / (1 - b1**step),     v' = v / (1 - b2**step)
        p <- p - learning_rate * (m' / (sqrt(v' + eps_root) + eps) + weight_decay p)

    as `optax.adamw`, on every leaf, all in one equation. Computed in float32 (float64
    for float64) from the unrounded m and v, each result rounded once, so bfloat16
    parameters may have float32 moments. A weight without gradient so far (v = 0) moves
    by its decay alone and has a zero derivative in g. Donate the old arrays to
    `jax.jit` and the new ones are written in their place; the GPU kernel always writes
    in place, so XLA first copies for it what was not donated.

    Args:
      params: pytree of arrays of any float dtype.
      grads: pytree of the same structure and shapes.
      m, v: pytrees of the same structure and shapes: first and second moments; zeros
        before the first step.
      step: the number of this step, 1 for the first; may be traced.
      learning_rate: may be traced.
      b1, b2: decay of the moments, in [0, 1).
      eps: added outside the root, where the paper has it; positive.
      eps_root: added inside the root; above 0 to differentiate through the update.
      weight_decay: 1e-4 as in optax; PyTorch has 1e-2.
      grad_scale: a factor of all gradients, such as clips their norm; may be traced.
      copy: pytree like `params` of other dtypes, such as the bfloat16 weights that a
        loss reads. The new parameters are written there too; the old ones are not read.

    Returns:
      params, m, v: as given, in their dtypes; with `copy` also the new copy.

    Raises:
      TypeError: a dtype or shape does not fit.
      ValueError: an option out of range, or pytrees that differ.

    Example:
      >>> params, grads = {"w": jnp.array([1.0, -1.0])}, {"w": jnp.array([0.5, 0.0])}
      >>> m = v = {"w": jnp.zeros(2)}
      >>> params, m, v = jaxkern.adamw_update(params, grads, m, v, 1, learning_rate=0.1)
      >>> params["w"], m["w"]
      (Array([ 0.9, -1. ], dtype=float32), Array([0.05, 0.  ], dtype=float32))
    """
    for name, b in (("b1", b1), ("b2", b2)):
        if not 0 <= b < 1:
            raise ValueError(f"adamw_update: `{name}` must lie in [0, 1), got {b}.")
    if not (eps > 0 and eps_root >= 0):
        raise ValueError(
            "adamw_update: `eps` must be positive and `eps_root` not negative, got "
            f"{eps} and {eps_root}."
        )
    leaves, tree = jax.tree.flatten(params)
    named = {"grads": grads, "m": m, "v": v} | ({} if copy is None else {"copy": copy})
    others = [(n, jax.tree.flatten(t)) for n, t in named.items()]
    for name, (_, other) in others:
        if other != tree:
            raise ValueError(
                f"adamw_update: `{name}` must be a pytree like `params`, {tree}, got "
                f"{other}."
            )
    options = dict(b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=weight_decay)
    lists = [leaves, *(other for _, (other, _) in others)]
    if copy is not None:
        scale = 1.0 if grad_scale is None else grad_scale
        new = adamw_copied_tree_p(*lists, learning_rate, step, scale, **options)
        return tuple(map(tree.unflatten, new))
    if grad_scale is not None:
        scale = jnp.asarray(grad_scale)
        lists[1] = [
            at_least_f32(g) * scale.astype(at_least_f32(g).dtype) for g in lists[1]
        ]
    new = adamw_tree_p(*lists, learning_rate, step, **options)
    return tuple(map(tree.unflatten, new))


@check_arguments
def adam_update(
    params: Any,
    grads: Any,
    m: Any,
    v: Any,
    step: int | Integer[Array, ""],
    *,
    learning_rate: float | Float[Array, ""],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
) -> tuple[Any, Any, Any]:
    """One step of Adam (https://arxiv.org/abs/1412.6980) on a whole pytree.

        p <- p - learning_rate * m' / (sqrt(v' + eps_root) + eps)

    with m' and v' of `adamw_update`: that without weight decay, as `optax.adam`.

    Args:
      params, grads, m, v: pytrees of one structure, see `adamw_update`.
      step: which update this is, from 1 on.
      learning_rate, b1, b2, eps, eps_root: see `adamw_update`.

    Returns:
      The new params, m and v, each of its old dtype.

    Raises:
      ValueError: the trees differ, or an option is out of its range.

    Example:
      >>> params, grads = {"w": jnp.array([1.0, -1.0])}, {"w": jnp.array([0.5, 0.0])}
      >>> m = v = {"w": jnp.zeros(2)}
      >>> params, m, v = jaxkern.adam_update(params, grads, m, v, 1, learning_rate=0.1)
      >>> params["w"], m["w"]
      (Array([ 0.9, -1. ], dtype=float32), Array([0.05, 0.  ], dtype=float32))
    """
    return adamw_update(
        params,
        grads,
        m,
        v,
        step,
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=0.0,
    )


class AdamWOptions(TypedDict):
    b1: float
    b2: float
    eps: float
    eps_root: float
    weight_decay: float


def adamw_reference(
    param: Float[Array, "..."],
    grad: Float[Array, "..."],
    m: Float[Array, "..."],
    v: Float[Array, "..."],
    learning_rate: Float[Array, ""],
    step: Integer[Array, ""],
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    weight_decay: float,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    p32, g32, m32, v32 = map(at_least_f32, (param, grad, m, v))
    m32 = b1 * m32 + (1 - b1) * g32
    v32 = b2 * v32 + (1 - b2) * g32 * g32
    t = step.astype(m32.dtype)
    mean = m32 / one_minus_power(b1, t)
    square = v32 / one_minus_power(b2, t) + eps_root
    seen = square > 0  # the root of 0 has no finite derivative
    root = jnp.where(seen, jnp.sqrt(jnp.where(seen, square, 1)), 0)
    change = at_least_f32(learning_rate) * (mean / (root + eps) + weight_decay * p32)
    return (
        (p32 - change).astype(param.dtype),
        m32.astype(m.dtype),
        v32.astype(v.dtype),
    )


def one_minus_power(b: float, t: Float[Array, ""]) -> Float[Array, ""]:
    """1 - b**t without the cancellation, which costs 1e-4 at b2 = 0.999, t = 1."""
    return -jnp.expm1(t * (math.log(b) if b else -math.inf))


def adamw_copied_reference(
    param: Float[Array, "..."],
    grad: Float[Array, "..."],
    m: Float[Array, "..."],
    v: Float[Array, "..."],
    copy: Float[Array, "..."],
    learning_rate: Float[Array, ""],
    step: Integer[Array, ""],
    grad_scale: Float[Array, ""],
    **options: Unpack[AdamWOptions],
) -> tuple[
    Float[Array, "..."], Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]
]:
    """The same with the gradient times a factor, and the result in copy's dtype too."""
    g32 = at_least_f32(grad)
    param, m, v = adamw_reference(
        param,
        g32 * grad_scale.astype(g32.dtype),
        m,
        v,
        learning_rate,
        step,
        **options,
    )
    return param, m, v, param.astype(copy.dtype)


adamw_p = kernel_primitive(adamw_reference)
adamw_tree_p = leafwise_primitive(adamw_p)
adamw_copied_p = kernel_primitive(adamw_copied_reference)
adamw_copied_tree_p = leafwise_primitive(adamw_copied_p)
