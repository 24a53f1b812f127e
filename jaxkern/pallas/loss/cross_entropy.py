"""Loss and gradient of the logits `[..., v]` in one read and one write, on Hopper.

    loss = weight (lse - logits[label] + z_loss lse^2)
    dlogits = weight ((1 + 2 z_loss lse) exp(logits - lse) - one_hot(label))

As in Liger (https://arxiv.org/abs/2410.10989) the forward pass makes the gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.activation.softmax import LOG2E, row_sums, running_sums
from jaxkern.pallas.rows.clusters import walk_rows
from jaxkern.pallas.rows.plan import few_rows, plan, refusal
from jaxkern.primitives.loss.cross_entropy import as_class, is_counted, loss_of_sums

SHORTEST = 32000  # logits, as measured


def unsupported(
    logits: Any,
    weight: Any,
    label_smoothing: float,
    softcap: float | None,
    **_: Any,
) -> str | None:
    """A reason in words, or None."""
    if softcap is not None or label_smoothing:
        return "`softcap` and `label_smoothing` are Triton's"
    if jnp.issubdtype(weight.dtype, jnp.float64):
        return "`weight` is float64"
    return refusal(logits)


def slower(logits: Any, **_: Any) -> str | None:
    if logits.shape[-1] < SHORTEST:
        return f"a row has {logits.shape[-1]} logits, less than {SHORTEST}"
    return few_rows(logits)


def weighted_cross_entropy_fwd(
    logits: jax.Array,
    labels: jax.Array,
    weight: jax.Array,
    *,
    label_smoothing: float,
    z_loss: float,
    softcap: None,
    ignore_index: int | None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del softcap  # absent
    v, label = logits.shape[-1], as_class(labels)
    counted = is_counted(label, ignore_index)
    known = (label >= 0) & (label < v)
    weight = weight.astype(jnp.float32)
    gradient, lse = gradient_and_lse(
        logits,
        jnp.where(known, label, 0).astype(jnp.int32),
        jnp.where(counted & known, weight, 0),
        z_loss=z_loss,
        interpret=interpret,
    )
    at = jnp.where(known, label, 0)[..., None]
    picked = jnp.take_along_axis(logits, at, axis=-1)[..., 0].astype(jnp.float32)
    lse = lse.reshape(label.shape)
    options = (label_smoothing, z_loss, ignore_index)
    loss = loss_of_sums(lse, picked, None, label, v, *options)
    return loss * weight, gradient, loss


def gradient_and_lse(
    logits: jax.Array,
    label: jax.Array,
    weight: jax.Array,
    *,
    z_loss: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """dlogits `[..., v]` in the dtype of the logits, and lse of each row, float32."""
    v = logits.shape[-1]
    n = logits.size // v
    c = plan(n, v, logits.dtype.itemsize)
    assert c is not None  # as `unsupported` found

    def consume(walk, extra_refs, more_refs):
        label_ref, weight_ref = extra_refs
        [lse_ref] = more_refs

        def total(i, carry):
            base, total = row_sums(walk, i, carry, LOG2E)
            lse2 = base + jnp.log2(total)
            row, lse = walk.row(i), lse2 / LOG2E

            @pl.when((walk.rank == 0) & (walk.me == 0))
            def _():
                lse_ref[row] = lse

            none = total == 0.0
            label, weight = label_ref[row], jnp.where(none, 0.0, weight_ref[row])
            lse2 = jnp.where(none, 0.0, lse2)
            return lse2, weight, label

        def write(slot, j, sums):
            lse2, weight, label = sums
            slope = weight * (1 + 2 * z_loss / LOG2E * lse2)
            line, column = lax.div(label, c.width), lax.rem(label, c.width)
            first = walk.first_line(j) + walk.me * c.share

            def of_piece(k, here):
                z = walk.read(0, slot, k)
                dz = slope * jnp.exp2(z * LOG2E - lse2)
                if here:
                    lines = plgpu.broadcasted_iota(
                        jnp.int32, c.piece, 0, layout=c.layout
                    )
                    columns = plgpu.broadcasted_iota(
                        jnp.int32, c.piece, 1, layout=c.layout
                    )
                    hit = (lines == line - first - k * c.piece[0]) & (columns == column)
                    dz = jnp.where(hit, dz - weight, dz)
                walk.write(slot, k, dz)

            here = (line >= first) & (line < first + c.share)

            @pl.when(here)
            def _():
                for k in range(c.pieces):
                    of_piece(k, True)

            @pl.when(jnp.logical_not(here))
            def _():
                for k in range(c.pieces):
                    of_piece(k, False)

        init, add = running_sums(walk, LOG2E)
        walk.rows_of(init, add, total, write)

    dlogits, lse = walk_rows(
        c,
        (logits,),
        (label.reshape(n), weight.reshape(n)),
        2,
        consume,
        interpret,
        "cross_entropy",
        (jax.ShapeDtypeStruct((n,), jnp.float32),),
    )
    return dlogits, lse
