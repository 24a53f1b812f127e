"""`train_step`: loss and optimiser to one compiled step that owns its state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from jaxkern.train.adamw import AdamW

LossFn = Callable[[Any, Any], Any]
"""(weights, batch) -> loss, or (mean loss, over how much it is the mean)."""


COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""How XLA compiles a step on a GPU.

Its own Triton products win when it times them one by one, and lose in a step: cuBLAS
adds to what is there where several gradients flow into one.
"""


class GradientTransformation(Protocol):
    """An optimiser of optax."""

    @property
    def init(self) -> Callable[[Any], Any]: ...
    @property
    def update(self) -> Callable[..., tuple[Any, Any]]: ...


class TrainState(NamedTuple):
    """Everything that a run continues from; a pytree of arrays.

    Attributes:
      params: the weights, those that are not trained among them.
      copy: trained ones of float32 in the compute dtype, None where that is theirs.
      optimizer: what the optimiser keeps.
      steps: updates made.
      skipped: batches whose gradient was not finite.
    """

    params: Any
    copy: Any
    optimizer: Any
    steps: Int32[Array, ""]
    skipped: Int32[Array, ""]


class Metrics(NamedTuple):
    """Of one step.

    Attributes:
      loss: of the whole batch, before the update.
      grad_norm: over all trained weights, before clipping.
      skipped: whether loss or norm was not finite, so that nothing was updated.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    skipped: Bool[Array, ""]


@dataclass(frozen=True)
class TrainStep:
    """What `train_step` returns: `init`, and calls that make one step each.

    Attributes:
      loss_fn, optimizer, compute_dtype, accumulate, clip_norm, trained: of
        `train_step`.
    """

    loss_fn: LossFn
    optimizer: AdamW | GradientTransformation
    compute_dtype: jnp.dtype
    accumulate: int
    clip_norm: float | None
    trained: Any = None
    compiled: dict[Any, Callable] = field(default_factory=dict, repr=False)

    def init(self, params: Any) -> TrainState:
        """The state before the first step; its arrays are cut as those of `params`.

        What is trained is copied: the first step donates it, not what was given.

        Raises:
          TypeError: a leaf that is trained and no array of floats, or no array.
          ValueError: `trained` does not fit the tree, or chooses no leaf.
        """
        own, frozen = self.split(params)
        if frozen is not None and not jax.tree.leaves(own):
            raise ValueError("train_step: `trained` chooses no leaf of `params`.")
        check_leaves(own, frozen)
        own = jax.tree.map(jnp.copy, own)
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(
            joined(own, frozen),
            self.narrowed(own),
            self.optimizer.init(own),
            zero,
            jnp.copy(zero),
        )
        return on_the_mesh_of(params, state)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step, compiled; the arrays of `state` are gone afterwards.

        But for those that are not trained, which the new state has too.

        Raises:
          ValueError: the rows of `batch` do not divide into `accumulate` parts, or the
            loss is no single number.
        """
        own, frozen = self.split(state.params)
        state = state._replace(params=own)
        leaves, tree = jax.tree.flatten(state)
        shardings = tuple(leaf.sharding for leaf in leaves)
        if (tree, shardings) not in self.compiled:
            self.compiled[tree, shardings] = jax.jit(
                self.update_trained,
                donate_argnums=0,
                out_shardings=(tree.unflatten(shardings), None),
                compiler_options=options_for(shardings),
            )
        state, metrics = self.compiled[tree, shardings](state, frozen, batch)
        return state._replace(params=joined(state.params, frozen)), metrics

    def update(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """The same as a pure function, to be compiled by the caller.

        On a GPU with `COMPILER_OPTIONS`, as a call of this step is. Who donates the
        state donates what is not trained too.
        """
        own, frozen = self.split(state.params)
        state = state._replace(params=own)
        state, metrics = self.update_trained(state, frozen, batch)
        return state._replace(params=joined(state.params, frozen)), metrics

    def split(self, params: Any) -> tuple[Any, Any]:
        """What is trained and what is not: each `params`, with None for the other.

        The second is None where every leaf is trained.
        """
        if self.trained is None:
            return params, None
        chosen = chosen_leaves(self.trained, params)
        own = jax.tree.map(lambda p, c: p if c else None, params, chosen)
        return own, jax.tree.map(lambda p, c: None if c else p, params, chosen)

    def update_trained(
        self, state: TrainState, frozen: Any, batch: Any
    ) -> tuple[TrainState, Metrics]:
        """One step of a state whose `params` are those that are trained."""
        loss, grads = self.gradient(state.params, state.copy, batch, frozen)
        squares = [jnp.sum(wide(g) ** 2) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        scale = None
        if self.clip_norm is not None:
            scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1)

        def write(state: TrainState, grads: Any) -> TrainState:
            params, copy, kept = self.written(state, grads, scale)
            return TrainState(params, copy, kept, state.steps + 1, state.skipped)

        def skip(state: TrainState, grads: Any) -> TrainState:
            del grads
            return state._replace(skipped=state.skipped + 1)

        # in place; a select of both would hold the new state beside the old one
        state = lax.cond(finite, write, skip, state, grads)
        return state, Metrics(loss, norm, ~finite)

    def gradient(
        self, params: Any, copy: Any, batch: Any, frozen: Any = None
    ) -> tuple[Float[Array, ""], Any]:
        """The loss of the batch and its gradient.

        Of one part in the dtypes of what the loss reads, where products round it; of
        several their sum in float32, or wider. The loss also reads what is `frozen`.
        """
        weights = jax.tree.map(lambda p, c: p if c is None else c, params, copy)

        def of_part(weights: Any, part: Any) -> tuple[Array, Array]:
            out = self.loss_fn(joined(weights, frozen), part)
            loss, weight = out if isinstance(out, tuple) else (out, 1)
            if jnp.shape(loss) != () or jnp.shape(weight) != ():
                raise ValueError(
                    "train_step: `loss_fn` must return one number, or a pair of the "
                    "mean and how much it is the mean of, got shapes "
                    f"{jnp.shape(loss)} and {jnp.shape(weight)}."
                )
            return loss.astype(jnp.float32), jnp.asarray(weight, jnp.float32)

        take = jax.value_and_grad(of_part, has_aux=True)
        if self.accumulate == 1:
            (loss, _), grads = take(weights, batch)
            return loss, grads

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            (loss, weight), grads = take(weights, part)
            new = jax.tree.map(lambda g: weight.astype(wide(g).dtype) * wide(g), grads)
            new = (weight * loss, weight, new)
            return jax.tree.map(jnp.add, sums, new), None

        zero = jnp.zeros((), jnp.float32)
        zeros = jax.tree.map(lambda w: jnp.zeros_like(wide(w)), weights)
        parts = microbatches(batch, self.accumulate)
        (loss, weight, grads), _ = lax.scan(add, (zero, zero, zeros), parts)
        share = jnp.where(weight > 0, 1 / weight, 0)
        return loss * share, jax.tree.map(lambda g: g * share.astype(g.dtype), grads)

    def written(
        self, state: TrainState, grads: Any, scale: Float[Array, ""] | None
    ) -> tuple[Any, Any, Any]:
        """The weights after the optimiser's update, their copy, and what it keeps."""
        params, kept = state.params, state.optimizer
        if isinstance(self.optimizer, AdamW):  # reads gradients and scale as they are
            return self.optimizer.write(params, grads, kept, state.copy, scale)
        if scale is not None:
            grads = jax.tree.map(lambda g: wide(g) * scale.astype(wide(g).dtype), grads)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, kept = self.optimizer.update(grads, kept, params)
        new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return new, self.narrowed(new), kept

    def narrowed(self, params: Any) -> Any:
        """Weights of float32 in the compute dtype, None in the place of others."""

        def narrow(p: Array) -> Array | None:
            if p.dtype != jnp.float32 or self.compute_dtype == jnp.float32:
                return None
            return p.astype(self.compute_dtype)

        return jax.tree.map(narrow, params)


def train_step(
    loss_fn: LossFn,
    optimizer: AdamW | GradientTransformation,
    *,
    compute_dtype: DTypeLike = jnp.bfloat16,
    accumulate: int = 1,
    clip_norm: float | None = None,
    trained: Any = None,
) -> TrainStep:
    """One training step as one compiled program, its state donated.

        g = gradient of the loss at the copy of the weights, summed in float32
        g = g * min(1, clip_norm / |g|)
        weights, copy = optimiser(weights, g), the same in the compute dtype

    The float32 weights are never converted inside the loss: the copy that it reads is
    written where the weights are. A step whose loss or gradient is not finite leaves
    weights and optimiser as they were and is counted in `state.skipped`.

    With `accumulate` the batch is read in so many parts, one after the other: part i
    are the rows i, i + accumulate, ... of each leaf, so that rows cut over devices stay
    where they are. Parts count equally, or by the second value of the loss: with the
    number of tokens of each part the sum is the gradient of the whole batch.

    `trained` says which leaves of the weights change, as the mask of `optax.masked`
    does: adapters, say, beside packed weights. The loss reads the others as they are,
    of any dtype; they have no gradient, copy or part of the optimiser's state, and no
    step copies them.

    Args:
      loss_fn: `(weights, batch) -> loss`, one float, or `(loss, weight)` of a mean and
        how much it is the mean of.
      optimizer: `AdamW`, or any optax `GradientTransformation`.
      compute_dtype: in which the loss gets weights of float32.
      accumulate: parts of a batch, at least 1.
      clip_norm: the largest norm over all gradients together, positive; None for any.
      trained: True or False for each leaf, in the tree of the weights or in its
        beginning, where one stands for all below it; or a function of the weights that
        returns this. None for all leaves.

    Returns:
      `TrainStep`: `state = step.init(params)`, then
      `state, metrics = step(state, batch)`.

    Raises:
      TypeError: the compute dtype is no float, or the optimiser has no `init`.
      ValueError: `accumulate` or `clip_norm` out of range.

    Example:
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w.astype(x.dtype) - 1) ** 2)
      >>> step = jaxkern.train.train_step(loss, jaxkern.train.AdamW(0.1))
      >>> state, metrics = step(step.init(jnp.zeros(2)), jnp.ones((4, 2)))
      >>> float(metrics.loss), int(state.steps)
      (1.0, 1)
    """
    dtype = jnp.dtype(compute_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"train_step: `compute_dtype` must be a float dtype, got {dtype.name}."
        )
    if not (callable(loss_fn) and callable(getattr(optimizer, "init", None))):
        raise TypeError(
            "train_step: `loss_fn` must be a function and `optimizer` an AdamW or a "
            f"GradientTransformation of optax, got {type(loss_fn).__name__} and "
            f"{type(optimizer).__name__}."
        )
    if accumulate < 1:
        raise ValueError(f"train_step: `accumulate` must be >= 1, got {accumulate}.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(
            f"train_step: `clip_norm` must be positive, got {clip_norm}. Leave it out "
            "to clip nothing."
        )
    return TrainStep(loss_fn, optimizer, dtype, accumulate, clip_norm, trained)


def chosen_leaves(trained: Any, params: Any) -> Any:
    """True or False for each leaf of `params`."""
    # a module of bools may be called too, but it is a tree
    is_function = callable(trained) and jax.tree_util.all_leaves([trained])
    wanted = trained(params) if is_function else trained
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        if not isinstance(leaf, bool | np.bool_):
            raise TypeError(
                "train_step: `trained` must be True or False for each leaf of `params`,"
                f" got {type(leaf).__name__} at {jax.tree_util.keystr(path)}."
            )
    try:
        return jax.tree.map(
            lambda one, part: jax.tree.map(lambda _: bool(one), part), wanted, params
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            "train_step: `trained` must be the tree of `params` or the beginning of "
            f"it: {error}"
        ) from error


def joined(own: Any, frozen: Any) -> Any:
    """The tree of which each has some leaves, and None in the place of the others."""
    if frozen is None:
        return own
    return jax.tree.map(
        lambda a, b: b if a is None else a, own, frozen, is_leaf=lambda x: x is None
    )


def check_leaves(own: Any, frozen: Any) -> None:
    """Raises TypeError but for arrays, of floats where they are trained."""
    for path, p in jax.tree_util.tree_leaves_with_path(own):
        dtype = getattr(p, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                "train_step: every leaf of `params` that is trained must be an array "
                f"of floats, got {type(p).__name__ if dtype is None else dtype} at "
                f"{jax.tree_util.keystr(path)}. Mark it False in `trained`."
            )
    for path, p in jax.tree_util.tree_leaves_with_path(frozen):
        if not isinstance(p, jax.Array | np.ndarray):
            raise TypeError(
                "train_step: every leaf of `params` must be an array, got "
                f"{type(p).__name__} at {jax.tree_util.keystr(path)}."
            )


def options_for(shardings: Sequence[Sharding]) -> dict[str, bool] | None:
    """`COMPILER_OPTIONS` where the state lies on GPUs."""
    devices = {d.platform for s in shardings for d in s.device_set}
    return COMPILER_OPTIONS if devices == {"gpu"} else None


def wide(x: Array) -> Array:
    """x in float32, or in float64 if it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def microbatches(batch: Any, parts: int) -> Any:
    """Leaves `[b, ...]` as `[parts, b / parts, ...]`; part i are rows i, i + parts."""

    def split(x: Array) -> Array:
        if jnp.ndim(x) < 1 or x.shape[0] % parts:
            raise ValueError(
                f"train_step: the rows of `batch` must divide into {parts} parts, got "
                f"shape {jnp.shape(x)}."
            )
        rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])
        return jnp.swapaxes(rows, 0, 1)

    return jax.tree.map(split, batch)


def on_the_mesh_of(params: Any, state: TrainState) -> TrainState:
    """The state with what lies on one device alone, such as counters, on the mesh.

    Every array is bound to its devices, as what a step returns is: for a state that is
    not, the first step would be compiled apart.
    """
    cuts = [p.sharding for p in jax.tree.leaves(params) if isinstance(p, jax.Array)]
    meshes = [cut.mesh for cut in cuts if isinstance(cut, NamedSharding)]

    def placed(x: Array | np.ndarray) -> Array:
        if isinstance(x, np.ndarray):
            x = jnp.asarray(x)
        if meshes and not isinstance(x.sharding, NamedSharding):
            return jax.device_put(x, NamedSharding(meshes[0], PartitionSpec()))
        return jax.device_put(x, x.sharding)

    return jax.tree.map(placed, state)
