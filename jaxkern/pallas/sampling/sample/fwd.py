"""Sampling by top_p, min_p and temperature in one launch, on Hopper.

    kept: the largest t for which the weights exp(x / temperature) of the logits x >= t
    are at least top_p of all. Of these the first at which their running sum exceeds
    uniform times their sum

for logits `[..., v]`, as nucleus sampling has it (https://arxiv.org/abs/1904.09751).
A cluster of programs holds a row in shared memory: one read of the logits, then passes
over them there. docs/design/sampling.md has the measurements.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.device import next_power_of_2
from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.pallas.rows.clusters import join, store
from jaxkern.pallas.sampling.sample.cluster_row import ClusterRow, running_sum
from jaxkern.pallas.sampling.sample.cut import (
    Weights,
    cut_of_share,
    number,
    value_at,
)
from jaxkern.pallas.sampling.sample.exchange import (
    exchange_memory,
    exchanged_by_device,
)
from jaxkern.pallas.sampling.sample.plan import (
    BINS,
    COPIES,
    NOWHERE,
    STEP,
    WARPGROUPS,
    WARPS,
    in_each_warp,
    plan,
    refusal,
)

SHORTEST = 8192  # logits, as measured
LOG2E = math.log2(math.e)
DENORMAL = 2.0**-149  # so that a gap of inf weighs nothing at any temperature


def unsupported(*, logits: Any, top_k: Any, top_p: Any, **_: Any) -> str | None:
    """A reason in words, or None."""
    if top_k is not None:
        return "`top_k` is Triton's"
    if top_p is None:
        return "without `top_p` two launches of Triton are as fast"
    return refusal(logits)


def slower(*, logits: Any, **_: Any) -> str | None:
    if logits.shape[-1] < SHORTEST:
        return f"a row has {logits.shape[-1]} logits, less than {SHORTEST}"
    return None


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top_k: None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    del top_k  # absent
    v = logits.shape[-1]
    n = logits.size // v
    c = plan(n, v, logits.dtype)
    assert c is not None  # as `unsupported` found
    options = [x for x in (uniform, temperature, top_p, min_p) if x is not None]
    options = [x.reshape(n).astype(jnp.float32) for x in options]

    def kernel(logits_ref, *refs):
        refs = list(refs)
        uniform_ref, temperature_ref = refs.pop(0), refs.pop(0)
        top_p_ref = None if top_p is None else refs.pop(0)
        min_p_ref = None if min_p is None else refs.pop(0)
        token_ref, *device, scratch = refs
        row = ClusterRow(c, scratch, device, interpret)
        i = row.row
        t = temperature_ref[i]
        w = weights_of(row, logits_ref, t)
        greedy = jnp.logical_not(t > 0) | (w.best == jnp.inf)
        cut = jnp.where(greedy, w.best, -jnp.inf)
        if top_p_ref is not None:
            share = top_p_ref[i]
            searched = jnp.logical_not(greedy) & (share < 1)
            cut = lax.cond(searched, lambda: cut_of_share(row, w, share), lambda: cut)
        least = None if min_p_ref is None else jnp.minimum(min_p_ref[i], 1.0)
        u = jnp.where(t > 0, uniform_ref[i], 0.0)
        draw(row, token_ref, w, u, cut, least)

    [token, *_] = plgpu.kernel(
        kernel,
        kernel_name=kernel_name("sample", cluster=c.cluster, lines=c.lines_of_warp),
        out_type=(
            jax.ShapeDtypeStruct((n,), jnp.int32),
            *(exchanged_by_device(c) if interpret else ()),
        ),
        grid=(n,),
        grid_names=("row",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=(
            (
                plgpu.SMEM(c.held, logits.dtype),
                plgpu.SMEM((BINS + NOWHERE, COPIES), jnp.uint32),
                plgpu.Barrier(num_barriers=WARPGROUPS * c.chunks, num_arrivals=WARPS),
                plgpu.Barrier(num_arrivals=WARPGROUPS),
                *exchange_memory(c),
            ),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            reduction_scratch_bytes=0,  # no sum goes over warps
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(logits.reshape(n, c.lines, c.width), *options)
    return token.reshape(uniform.shape)


def weights_of(row: ClusterRow, logits_ref: Any, t) -> Weights:
    """Reads the row; the best logit is found."""
    row.fetch(logits_ref)
    row.clear()
    row.exchange.start()
    # NaN is above nothing
    peak = row.as_it_comes(
        lambda x, peak: jnp.where(x > peak, x, peak), row.splat(-jnp.inf)
    )
    row.exchange.await_start()
    best = jnp.max(row.exchange.of_warps(0, jnp.max(peak, axis=1)), axis=0)
    slope = jnp.maximum(LOG2E / jnp.where(t > 0, t, 1.0), DENORMAL)
    # of a best logit of inf all weight is at `base` and above
    base = jnp.where(jnp.abs(best) == jnp.inf, 0.0, best)
    return Weights(best, base, slope)


def first_beyond(weight, goal, interpret: bool):
    """Where the running sum exceeds `goal`, or the last weight is; the sum before."""
    [size] = weight.shape
    upto = running_sum(weight, in_each_warp(size), interpret)
    place, counts = number(size), weight > 0.0
    beyond = jnp.max(jnp.where((upto > goal) & counts, size - place, 0), axis=0)
    last = jnp.max(jnp.where(counts, place, 0), axis=0)
    first = jnp.minimum(size - beyond, last)
    return first, value_at(upto, first - 1)


def draw(row: ClusterRow, token_ref: Any, w: Weights, u, cut, least) -> None:
    """The first token whose cumulative kept weight exceeds u of all of it."""
    c = row.c

    def kept(x):
        weight = w.of(x)
        weight = jnp.where(x >= cut, weight, 0.0)
        return weight if least is None else jnp.where(weight < least, 0.0, weight)

    total = row.over_lines(lambda x, sums: sums + kept(x), row.splat(0.0))
    mass = row.exchange.of_warps(1, jnp.sum(total, axis=1))
    goal = u * jnp.sum(mass, axis=0)
    winner, before = first_beyond(mass, goal, row.interpret)
    mine = winner - row.first_warp

    @pl.when((mine >= 0) & (mine < WARPS))
    def _():
        token = token_of_warp(row, kept, goal - before, mine)
        token_ref[row.row] = winner * (c.lines_of_warp * c.width) + token


def token_of_warp(row: ClusterRow, kept, goal, mine):
    """The place among the logits of a warp: its line, then the logit in it.

    The four warps of its warpgroup have every fourth line each.
    """
    c = row.c
    lines = row.logits.at[row.me * WARPS + mine]
    together = math.gcd(c.lines_of_warp // WARPS, STEP)

    def add_up(i, _):
        first = [(i * together + k) * WARPS for k in range(together)]
        read = [row.load(lines.at[pl.ds(k, WARPS)], c.layout) for k in first]
        for k, weight in zip(first, [kept(x).sum(axis=1) for x in read], strict=True):
            store(row.exchange.sums.at[pl.ds(k, WARPS)], weight)

    lax.fori_loop(0, c.lines_of_warp // (together * WARPS), add_up, None)
    join(row.interpret)
    size = next_power_of_2(c.lines_of_warp)
    weight = row.load(row.exchange.sums.at[pl.ds(0, size)], in_each_warp(size))
    weight = jnp.where(number(size) < c.lines_of_warp, weight, 0.0)
    line, before = first_beyond(weight, goal, row.interpret)
    weight = kept(row.load(lines.at[line], in_each_warp(c.width)))
    token, _ = first_beyond(weight, goal - before, row.interpret)
    return line * c.width + token
