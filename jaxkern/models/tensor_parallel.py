"""A llama over the devices of a mesh axis: matrices cut as in Megatron-LM.

    x = x + sum over devices of (attention of own heads) o^T
    x = x + sum over devices of (silu(x gate^T) * (x up^T)) down^T

(https://arxiv.org/abs/1909.08053). q, k, v, gate and up are cut by rows and move
nothing; o and down are cut by columns, so each device has a part of every sum: two
all-reduces of `[b, t, d]` float32 a layer, and no others. A device reads its part of
the weights and of the cache, which is what a step of decoding waits for. Embedding and
norms are whole on each device, logits lie where their rows of the output do.

Where GPUs reach each other's memory a step of decoding is one chain of launches on
each, with the all-reduces among them (`jaxkern/gpu/peer_sum.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxkern import argmax
from jaxkern.lowering.chained import chained
from jaxkern.models import llama
from jaxkern.models.architecture import CacheForm
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.llama import Caches, Layer, LlamaConfig, LlamaWeights
from jaxkern.models.products import Matrices
from jaxkern.parallel.sum_over_devices import sum_over_devices

LARGEST_INDEX = 1 << 24


@dataclass(frozen=True)
class TensorParallel:
    """How a llama lies on a mesh; its methods are `prefill` and `decode` there.

        parts = TensorParallel(config, mesh, "x")
        weights = parts.cut(weights)
        cache = parts.empty_cache(batch, slots)
        logits, cache = jax.jit(parts.prefill)(weights, tokens, lengths, cache)
        logits, cache = jax.jit(parts.decode, donate_argnums=2)(weights, next, cache)

    Attributes:
      config: of the whole model.
      mesh: with the axis; on its other axes everything is repeated.
      axis_name: which axis cuts heads, hidden dims and vocabulary.

    Raises:
      TypeError: a config that is no llama's.
      ValueError: no such axis, or heads or vocabulary that it does not divide.
    """

    config: LlamaConfig
    mesh: Mesh
    axis_name: str

    def __post_init__(self) -> None:
        op = "TensorParallel"
        if not isinstance(self.config, LlamaConfig):
            raise TypeError(
                f"{op}: `config` must be a LlamaConfig, got "
                f"{type(self.config).__name__}: other pages are not cut yet."
            )
        if self.axis_name not in self.mesh.axis_names:
            known = ", ".join(map(repr, self.mesh.axis_names))
            raise ValueError(
                f"{op}: no mesh axis {self.axis_name!r}, known are {known}."
            )
        for name in ("heads", "kv_heads", "vocabulary"):
            if (n := getattr(self.config, name)) % self.devices:
                raise ValueError(
                    f"{op}: `{name}` is {n}, which {self.devices} devices of "
                    f"{self.axis_name!r} do not divide."
                )

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.axis_name]

    @property
    def part(self) -> LlamaConfig:
        """The config that one device has: its heads, and the axis to sum over."""
        n = self.devices
        return replace(
            self.config,
            heads=self.config.heads // n,
            kv_heads=self.config.kv_heads // n,
            summed_over=self.axis_name,
        )

    def cut(self, weights: LlamaWeights) -> LlamaWeights:
        """The weights on the mesh, each device with its part.

        Of what stands side by side each device gets a run of every part, in one array.

        Raises:
          TypeError: a matrix that is no array `[f, d]` of bfloat16 or float16.
          ValueError: a hidden dim that the devices do not divide, or a norm over the
            whole width of q or k.
        """
        arranged = self.arranged(weights)
        specs = self.specs(arranged)
        cut = jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)
        return jax.device_put(arranged, cut)

    def arranged(self, weights: LlamaWeights) -> LlamaWeights:
        """The weights with rows in the order of the devices that have them."""
        return weights._replace(
            layers=tuple(self.arranged_layer(*x) for x in enumerate(weights.layers)),
            output=(one_array("output", weights.output),),
        )

    def arranged_layer(self, i: int, layer: Layer) -> Layer:
        h = self.config.head_dim
        q, k = self.config.heads * h, self.config.kv_heads * h
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if norm is not None and norm.shape != (h,):
                raise ValueError(
                    f"TensorParallel: {name} of layer {i} is over {norm.size} dims of "
                    "all heads, which no device has."
                )
        qkv = one_array(f"qkv of layer {i}", layer.qkv)
        gate_up = one_array(f"gate_up of layer {i}", layer.gate_up)
        f = gate_up.shape[0] // 2
        if f % self.devices:
            raise ValueError(
                f"TensorParallel: layer {i} has {f} hidden dims, which {self.devices} "
                f"devices of {self.axis_name!r} do not divide."
            )
        by_head = partial(self.in_runs, ends=(q, q + k))
        by_half = partial(self.in_runs, ends=(f,))
        return layer._replace(
            qkv=(by_head(qkv),),
            qkv_bias=by_head(layer.qkv_bias),
            attention_output=(
                one_array(f"output of layer {i}", layer.attention_output),
            ),
            gate_up=(by_half(gate_up),),
            gate_up_bias=by_half(layer.gate_up_bias),
            down=(one_array(f"down of layer {i}", layer.down),),
        )

    def in_runs(self, rows: Any, ends: tuple[int, ...]) -> Any:
        """Parts that end at `ends`, each cut into runs: all first runs, all second."""
        if rows is None:
            return None
        runs = [
            part.reshape(self.devices, -1, *rows.shape[1:])
            for part in jnp.split(rows, ends)
        ]
        return jnp.concatenate(runs, axis=1).reshape(rows.shape)

    def specs(self, weights: LlamaWeights) -> LlamaWeights:
        """Where each dim of each weight is cut; `P()` for what is whole."""
        rows, columns = P(self.axis_name), P(None, self.axis_name)

        def layer(w: Layer) -> Layer:
            return jax.tree.map(lambda _: P(), w)._replace(
                qkv=(rows,),
                qkv_bias=None if w.qkv_bias is None else rows,
                attention_output=(columns,),
                gate_up=(rows,),
                gate_up_bias=None if w.gate_up_bias is None else rows,
                down=(columns,),
            )

        whole = jax.tree.map(lambda _: P(), weights._replace(layers=()))
        return whole._replace(layers=tuple(map(layer, weights.layers)), output=(rows,))

    def cache_specs(self, cache: Caches) -> Caches:
        heads = P(None, None, self.axis_name)
        return tuple(
            replace(own, keys=heads, values=heads, lengths=P()) for own in cache
        )

    def empty_cache(
        self, batch: int, slots: int, dtype: CacheForm = jnp.float32
    ) -> Caches:
        """That of `llama.empty_cache`, each device with its heads."""

        def empty() -> Caches:
            return llama.empty_cache(self.config, batch, slots, dtype)

        specs = self.cache_specs(jax.eval_shape(empty))
        cut = jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)
        return jax.jit(empty, out_shardings=cut)()

    def prefill(
        self,
        weights: LlamaWeights,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, " b"],
        cache: Caches,
    ) -> tuple[Float[Array, "b v"], Caches]:
        """`jaxkern.models.cached_steps.prefill`; the logits are cut over v."""
        after = self.cache_specs(cache)
        specs = self.specs(weights), P(), P(), after
        step = partial(prefill, self.part)
        run = self.on_devices(step, specs, (self.logits, after))
        return run(weights, tokens, lengths, cache)

    def decode(
        self,
        weights: LlamaWeights,
        tokens: Int32[Array, " b"],
        cache: Caches,
        counts: Int32[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b v"], Caches]:
        """`jaxkern.models.cached_steps.decode`; the logits are cut over v."""
        counts = jnp.ones_like(tokens) if counts is None else counts
        after = self.cache_specs(cache)
        specs = self.specs(weights), P(), after, P()
        run = self.in_a_chain(partial(decode, self.part), specs, after, self.logits)
        return run(weights, tokens, cache, counts)

    def next_tokens(
        self,
        weights: LlamaWeights,
        tokens: Int32[Array, " b"],
        cache: Caches,
        counts: Int32[Array, " b"] | None = None,
    ) -> tuple[Int32[Array, " b"], Caches]:
        """`decode`, and of its logits the largest, the first of equal ones.

        Of each device's largest the devices compare two numbers a sequence.
        """
        counts = jnp.ones_like(tokens) if counts is None else counts
        after = self.cache_specs(cache)
        ranks = jnp.arange(self.devices, dtype=jnp.int32)
        specs = P(self.axis_name), self.specs(weights), P(), after, P()

        def step(rank: Array, *operands: Any) -> tuple[Array, Caches]:
            logits, cache = decode(self.part, *operands)
            return largest_of(logits, rank, self.devices, self.axis_name), cache

        run = self.in_a_chain(step, specs, after, P())
        return run(ranks, weights, tokens, cache, counts)

    def peers(self) -> Any:
        """Which GPUs sum up through each other's memory, or None."""
        if any(d.platform != "gpu" for d in self.mesh.devices.flat):
            return None
        from jaxkern.gpu.launch_chain import peers_of  # imports Triton

        return peers_of(self.mesh, self.axis_name)

    @property
    def logits(self) -> P:
        return P(None, self.axis_name)

    def in_a_chain(
        self, step: Callable, in_specs: tuple, after: Caches, found: P
    ) -> Callable:
        """The step on each device, where that can be with its sums in one chain."""
        peers = self.peers()
        step = step if peers is None else chained(step, peers)
        # what a chain leaves is not known to be the same on all devices
        return self.on_devices(step, in_specs, (found, after), check_vma=peers is None)

    def on_devices(
        self, step: Callable, in_specs: tuple, out_specs: tuple, check_vma: bool = True
    ) -> Callable:
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )


def largest_of(
    part: Float[Array, "b v"], rank: Int32[Array, "1"], devices: int, axis_name: str
) -> Int32[Array, " b"]:
    """Where the largest is of rows that lie side by side on the devices.

    Each has a place of its own in a sum over the devices for what it found, in float32,
    which has all whole numbers up to 2^24.
    """
    v = part.shape[1]
    if devices * v > LARGEST_INDEX:
        raise ValueError(
            f"TensorParallel: `vocabulary` is {devices * v}, above {LARGEST_INDEX}, "
            "the largest token that is sent."
        )
    at = argmax(part)
    best = jnp.take_along_axis(part, at[:, None], axis=1)
    index = (at + rank * v).astype(jnp.float32)
    own = jnp.stack([best[:, 0], index])  # [2, b]
    mine = jnp.arange(devices) == rank
    own = jnp.where(mine[:, None, None], own, 0.0)
    every = sum_over_devices(own, axis_name=axis_name)  # [devices, 2, b]
    first = jnp.argmax(every[:, 0], axis=0)
    found = jnp.take_along_axis(every[:, 1], first[None], axis=0)[0]
    return found.astype(jnp.int32)


def one_array(name: str, matrices: Matrices) -> Float[Array, "f d"]:
    """The matrices, `[f, d]`, under each other."""
    arrays = []
    for w in matrices:
        if not isinstance(w, jax.Array) or w.dtype not in (jnp.bfloat16, jnp.float16):
            kind = w.dtype.name if isinstance(w, jax.Array) else type(w).__name__
            raise TypeError(
                f"TensorParallel: {name} must be arrays of bfloat16 or float16, got "
                f"{kind}. Load the model with one of these dtypes."
            )
        arrays.append(w)
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)
