"""What stands between the mixings of tokens: a gated block, or a choice of them.

dense(x)   = down (silu(gate x) * (up x)), or without a gate down relu(up x)**2
experts(x) = sum over the k best experts e of w_e expert_e(x), w = route(router x)
             + shared(x), times sigmoid(x . shared_gate) where there is one

With a `latent` the experts read a projection of x, and their sum is projected back.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import bias_activation, linear, moe_ffn, moe_ffn_fp8, route, sigmoid_gate
from jaxkern.models.branch import Branch
from jaxkern.models.expert_slots import (
    by_groups,
    by_slots,
    experts_of_groups,
    experts_of_slots,
)
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.products import FP8, Matrices, project
from jaxkern.models.weight_reader import WeightReader
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

Experts = Float[Array, "e f d"] | QuantizedTensor


class DenseWeights(NamedTuple):
    """Rows of gate and up, without a gate those of up, and what goes back."""

    gate_up: Matrices
    down: Matrices


@dataclass(frozen=True)
class Dense:
    """A block for every token, of so many channels.

    Attributes:
      suffix: of the names of its tensors: "_shexp" beside experts.
      gated: if not, down relu(up x)**2.
      alpha, scale: of scale * down (gate * sigmoid(alpha gate) * up).
    """

    width: int
    suffix: str = ""
    gated: bool = True
    alpha: float = 1.0
    scale: float = 1.0

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files."""
        f = self.width
        names = self.names(layout)
        wide = 2 * f if names == ("ffn_gate_up",) else f
        rows = {name: (wide, d) for name in names} | {"ffn_down": (d, f)}
        return {f"{name}{self.suffix}.weight": shape for name, shape in rows.items()}

    def names(self, layout: Layout) -> tuple[str, ...]:
        """Of what is read of x."""
        if not self.gated:
            return ("ffn_up",)
        return ("ffn_gate_up",) if layout.one_gate_up else ("ffn_gate", "ffn_up")

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> DenseWeights:
        end = f"{self.suffix}.weight"
        return DenseWeights(
            reader.matrices(*(f"{blk}.{name}{end}" for name in self.names(layout))),
            reader.matrices(f"{blk}.ffn_down{end}"),
        )

    def __call__(
        self, config, weights: DenseWeights, branch: Branch
    ) -> Float[Array, "b t d"]:
        y = self.hidden(config, weights, branch)
        return branch.joined(config, y, weights.down)

    def hidden(
        self, config, weights: DenseWeights, branch: Branch
    ) -> Float[Array, "b t f"]:
        """What goes back."""
        if self.gated:
            y = branch.gated(config, weights.gate_up, self.alpha)
        else:
            y = branch.project(config, weights.gate_up)
            y = bias_activation(y, None, activation="relu2")
        return y if self.scale == 1.0 else y * jnp.asarray(self.scale, y.dtype)


class MixtureWeights(NamedTuple):
    """None for what the architecture does not have.

    Attributes:
      router: float32, whatever the others are: rounded, it would choose other experts.
      gate: where `up` is None the rows of both, or those of up if there is no gate.
      correction: of the scores, for the choice alone.
      shared: a block that every token passes beside its experts.
    """

    router: Float[Array, "e d"]
    gate: Experts
    up: Experts | None
    down: Experts
    router_bias: Float[Array, " e"] | None = None
    correction: Float[Array, " e"] | None = None
    gate_bias: Float[Array, "e f"] | None = None
    up_bias: Float[Array, "e f"] | None = None
    down_bias: Float[Array, "e d"] | None = None
    shared: DenseWeights | None = None
    shared_gate: Float[Array, "1 d"] | None = None
    into_latent: Matrices | None = None
    from_latent: Matrices | None = None


@dataclass(frozen=True)
class Mixture:
    """So many experts of `width` channels, of which some are chosen for each token.

    The others are the options of `route` and, of the experts' gate, of `swiglu`.
    """

    experts: int
    width: int
    chosen: int
    shared: Dense | None = None
    shared_gate: bool = False
    router_bias: bool = False
    correction: bool = False
    bias: bool = False
    score: str = "softmax"
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scaling_factor: float = 1.0
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    gated: bool = True  # if not, an expert is down relu(up x)**2
    latent: int = 0  # channels that the experts read and give; 0: those of x

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files, where those have them."""
        e = self.experts
        found: Shapes = {"ffn_gate_inp.weight": (e, d)}
        if self.router_bias:
            found["ffn_gate_inp.bias"] = (e,)
        if self.correction:
            found["exp_probs_b.bias"] = (1, e) if layout.correction_row else (e,)
        found |= expert_tensors(self, d, layout)
        if self.shared is not None:
            found |= self.shared.tensors(d, layout)
        if self.shared_gate:
            found["ffn_gate_inp_shexp.weight"] = (1, d)
        if self.latent:
            found["ffn_latent_down.weight"] = (self.latent, d)
            found["ffn_latent_up.weight"] = (d, self.latent)
        return found

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> MixtureWeights:
        shared = into = back = None
        if self.shared is not None:
            shared = self.shared.read(reader, blk, layout)
            if self.shared.width == self.width and not self.latent:
                shared = shared_as_experts(reader, shared)
        if self.latent:
            into, back = (
                reader.matrices(f"{blk}.ffn_latent_{name}.weight")
                for name in ("down", "up")
            )
        correction = reader.vectors(f"{blk}.exp_probs_b.bias")
        return MixtureWeights(
            router=reader.vector(f"{blk}.ffn_gate_inp.weight"),
            router_bias=reader.vectors(f"{blk}.ffn_gate_inp.bias"),
            correction=None if correction is None else correction.reshape(-1),
            shared=shared,
            shared_gate=reader.vectors(f"{blk}.ffn_gate_inp_shexp.weight"),
            into_latent=into,
            from_latent=back,
            **read_experts(self, reader, blk, layout),
        )

    def __call__(
        self, config, weights: MixtureWeights, branch: Branch
    ) -> Float[Array, "b t d"]:
        if by_slots(config, self, weights, branch):
            y, normal = experts_of_slots(config, self, weights, branch)
            if normal is None:
                return y
            branch = branch._replace(x=y)
            return branch.added(self.of_shared(config, weights, normal))
        in_groups = by_groups(config, self, weights, branch)
        branch = branch.normalised(config)
        x = branch.reads
        scores = linear(x.astype(jnp.float32), weights.router, weights.router_bias)
        by_expert, ids = route(
            scores,
            self.chosen,
            score=self.score,
            normalize=self.normalize,
            correction_bias=weights.correction,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
            scaling_factor=self.scaling_factor,
        )
        if in_groups:
            y = experts_of_groups(self, weights, branch, by_expert, ids)
            if weights.shared is None:
                return y
            return branch._replace(x=y).added(self.of_shared(config, weights, x))
        rows = x
        if weights.into_latent is not None:
            rows = project(config, x, weights.into_latent)
        layer: Any = moe_ffn_fp8 if config.expert_dtype == FP8 else moe_ffn
        y = layer(
            rows,
            ids,
            by_expert.astype(x.dtype),
            weights.gate,
            weights.up,
            weights.down,
            weights.gate_bias,
            weights.up_bias,
            weights.down_bias,
            **self.gate_options(),
        )
        if weights.from_latent is not None:
            y = project(config, y, weights.from_latent)
        if weights.shared is None:
            return branch.added(y)
        return branch.added(y + self.of_shared(config, weights, x))

    def gate_options(self) -> dict[str, Any]:
        """How an expert makes of what it reads what goes back, for `moe_ffn`."""
        if not self.gated:
            return dict(activation="relu2", gated=False)
        return dict(alpha=self.alpha, limit=self.limit, up_offset=self.up_offset)

    def of_shared(
        self, config, weights: MixtureWeights, x: Float[Array, "b t d"]
    ) -> Float[Array, "b t d"]:
        """What the block that every token passes gives."""
        assert self.shared is not None and weights.shared is not None
        shared = self.shared.hidden(config, weights.shared, Branch(x, None, x))
        shared = project(config, shared, weights.shared.down)
        if weights.shared_gate is None:
            return shared
        opening = linear(x, weights.shared_gate.astype(x.dtype))
        return sigmoid_gate(shared, jnp.broadcast_to(opening, shared.shape))


def shared_as_experts(reader: WeightReader, shared: DenseWeights) -> DenseWeights:
    """In the format of the others, beside which it is one slot more."""

    def kept(matrices: Matrices) -> Matrices:
        return tuple(
            reader.kept_experts(w) if isinstance(w, jax.Array) else w for w in matrices
        )

    return DenseWeights(kept(shared.gate_up), kept(shared.down))


def expert_tensors(mixture: Mixture, d: int, layout: Layout) -> Shapes:
    """The experts as the layout says; their biases lie as they do."""
    e, f, d = mixture.experts, mixture.width, mixture.latent or d
    if layout.experts == "mxfp4":
        found: Shapes = {}
        for name, wide, narrow in (("gate_up", 2 * f, d), ("down", d, f)):
            found[f"ffn_{name}_exps.blocks"] = (e, wide, narrow // 32, 16)
            found[f"ffn_{name}_exps.scales"] = (e, wide, narrow // 32)
    elif layout.experts in ("alternating", "columns"):
        rows = {"gate_up": (e, d, 2 * f), "down": (e, f, d)}
        found = {f"ffn_{name}_exps.weight": shape for name, shape in rows.items()}
    elif layout.experts == "fused":
        rows = {"gate_up": (e, 2 * f, d), "down": (e, d, f)}
        found = {f"ffn_{name}_exps.weight": shape for name, shape in rows.items()}
    else:
        rows = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        rows = {name: rows[name] for name in names_of(mixture)}
        if layout.experts == "single":
            return {
                f"ffn_{name}_exps.{i}.weight": shape
                for name, shape in rows.items()
                for i in range(e)
            }
        found = {f"ffn_{name}_exps.weight": (e, *shape) for name, shape in rows.items()}
    if mixture.bias:
        apart = layout.experts == "stacked"
        sizes = {"gate": f, "up": f} if apart else {"gate_up": 2 * f}
        for name, size in (sizes | {"down": d}).items():
            found[f"ffn_{name}_exps.bias"] = (e, size)
    return found


def read_experts(
    mixture: Mixture, reader: WeightReader, blk: str, layout: Layout
) -> dict[str, Any]:
    """gate, up and down as the policy keeps them, and their biases."""
    found = stored_experts(mixture, reader, blk, layout)
    for name in ("gate", "up", "down"):
        if isinstance(w := found.get(name), jax.Array):
            found[name] = reader.kept_experts(w)
    return with_one_gate_up(found)


def with_one_gate_up(found: dict[str, Any]) -> dict[str, Any]:
    """Gate and up in 8-bit floats as one array: one product reads x for both."""
    parts = found["gate"], found.get("up")
    if not all(isinstance(w, FP8Tensor) and w.block == (1, 0) for w in parts):
        return found
    gate, bias = jax.tree.map(lambda *a: jnp.concatenate(a, 1), *parts), None
    if found.get("gate_bias") is not None:
        bias = jnp.concatenate([found["gate_bias"], found["up_bias"]], axis=1)
    return found | {"gate": gate, "up": None, "gate_bias": bias, "up_bias": None}


def stored_experts(
    mixture: Mixture, reader: WeightReader, blk: str, layout: Layout
) -> dict[str, Any]:
    """The same, arrays before any rounding."""
    form, gate_up = layout.experts, f"{blk}.ffn_gate_up_exps"
    bias = reader.vectors(f"{gate_up}.bias")
    found: dict[str, Any] = {
        "down_bias": reader.vectors(f"{blk}.ffn_down_exps.bias"),
        "gate_bias": bias,
    }
    if form in ("alternating", "mxfp4"):
        if bias is not None:
            found |= {"gate_bias": bias[:, 0::2], "up_bias": bias[:, 1::2]}
        down = f"{blk}.ffn_down_exps"
        if form == "mxfp4":
            gate, up = (reader.mxfp4(gate_up, slice(i, None, 2)) for i in (0, 1))
            return found | {"gate": gate, "up": up, "down": reader.mxfp4(down)}
        both, down = (reader.experts(f"{name}.weight") for name in (gate_up, down))
        assert isinstance(both, jax.Array) and isinstance(down, jax.Array)
        both, down = (jnp.swapaxes(w, 1, 2) for w in (both, down))
        return found | {"gate": both[:, 0::2], "up": both[:, 1::2], "down": down}
    if form in ("fused", "columns"):
        both, down = (
            reader.experts(f"{blk}.ffn_{name}_exps.weight")
            for name in ("gate_up", "down")
        )
        if form == "columns":
            assert isinstance(both, jax.Array) and isinstance(down, jax.Array)
            both, down = (jnp.swapaxes(w, 1, 2) for w in (both, down))
        return found | {"gate": both, "up": None, "down": down}
    for name in names_of(mixture):
        at = f"{blk}.ffn_{name}_exps"
        names = [f"{at}.weight"]
        if form == "single":
            names = [f"{at}.{i}.weight" for i in range(mixture.experts)]
        found[name] = reader.experts(*names)
        found[f"{name}_bias"] = reader.vectors(f"{at}.bias")
    if not mixture.gated:
        found["gate"], found["up"] = found["up"], None
        found["gate_bias"] = found.pop("up_bias")
    return found


def names_of(mixture: Mixture) -> tuple[str, ...]:
    """Of the matrices of an expert that lie apart."""
    return ("gate", "up", "down") if mixture.gated else ("up", "down")
