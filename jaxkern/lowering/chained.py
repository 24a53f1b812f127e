"""`chained` launches the kernels of a function one after the other in few calls.

    y = chained(f)(x)      # f(x), its Triton kernels in calls of `gpu/launch_chain.py`

It follows the equations of f as they lower on a GPU. A kernel joins the chain; its
results are there later. What only looks at them otherwise, a reshape or a split, is an
address. What computes with them outside of kernels ends the chain, and the next kernel
begins another. Where there is no GPU, no library, or more than one device, f lowers as
ever; inside `shard_map` each device has chains of its own, and a `sum_over_devices` of
the axis of `peers` is a kernel of them.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Literal, Primitive
from jax.interpreters import batching, mlir

from jaxkern.lowering.explain import every_equation
from jaxkern.lowering.kernel_jaxpr import kernel_jaxpr
from jaxkern.parallel.sum_over_devices import NAME as SUM
from jaxkern.primitives.family import KernelPrimitive

if TYPE_CHECKING:
    from jaxkern.gpu.peer_sum import Peers

INLINED = {  # parameters that hold the jaxprs of an equation
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "chained": "jaxpr",
}
ALIGNED = 16  # bytes: what kernels are compiled for


def chained(f: Callable, peers: "Peers | None" = None) -> Callable:
    """f with its launches in chains where it runs on NVIDIA GPUs, each for itself.

    Args:
      f: of arrays alone, which are given to it and not closed over.
      peers: of `peers_of`, inside a `shard_map` over all axes of that mesh.

    Returns:
      A function of the same arguments with the same results.

    Example:
      >>> double = chained(lambda x: x + x)
      >>> float(double(jnp.float32(2.0)))
      4.0
    """

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        out = chained_p.bind(*jax.tree.leaves(args), jaxpr=closed, peers=peers)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


chained_p = Primitive("chained")
chained_p.multiple_results = True


def evaluate(*args: Any, jaxpr: Any, peers: "Peers | None" = None) -> list:
    del peers
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def batch(args: Sequence, axes: Sequence, *, jaxpr: Any, peers: Any):
    del peers
    out = jax.vmap(functools.partial(evaluate, jaxpr=jaxpr), tuple(axes))(*args)
    return out, [0] * len(out)


def lower_on_gpu(ctx, *args, jaxpr: Any, peers: "Peers | None"):
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1) or 1
    lowered = jaxpr if devices > 1 else as_chains(jaxpr, peers)
    f = functools.partial(evaluate, jaxpr=lowered)
    return mlir.lower_fun(f, multiple_results=True)(ctx, *args)


def as_chains(jaxpr: Any, peers: "Peers | None" = None) -> Any:
    """What a function lowers to on one GPU; traced once."""
    from jaxkern.gpu.device import compute_capability
    from jaxkern.gpu.launch_chain import missing  # imports Triton

    if missing():
        return jaxpr
    known = traced_chains.setdefault(jaxpr, {})
    if (key := (compute_capability(), peers)) not in known:
        f = functools.partial(in_chains, jaxpr=jaxpr, peers=peers)
        known[key] = jax.make_jaxpr(f)(*jaxpr.in_avals)
    return known[key]


# by function, then by compute capability and peers
traced_chains: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def in_chains(*args: Any, jaxpr: Any, peers: "Peers | None" = None) -> list:
    chains = Chains(peers)
    return chains.finished(chains.evaluate(jaxpr, args))


class Later(NamedTuple):
    """Elements that a chain will have written, in their order.

    Attributes:
      chain: which.
      pieces: (result of the chain, first element, number of elements).
    """

    chain: "Chain"
    pieces: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]
    dtype: Any

    def elements(self, start: int, count: int) -> tuple[tuple[int, int, int], ...]:
        """The pieces of a range of them."""
        found = []
        for result, first, length in self.pieces:
            least, most = max(start, 0), min(start + count, length)
            if least < most:
                found.append((result, first + least, most - least))
            start -= length
        return tuple(found)


class Chain:
    """Launches that are gathered, and their results once they are bound."""

    def __init__(self, peers: "Peers | None" = None) -> None:
        self.peers = peers
        self.operands: list[Any] = []
        self.steps: list[
            tuple[Any, list[Any]]
        ] = []  # launch, operands, results' number
        self.results: list[tuple[tuple[int, ...], Any]] = []
        self.aliases: list[tuple[int, int]] = []
        self.written: set[int] = set()  # operands that a result has overwritten
        self.made: list[Any] | None = None

    def operand(self, x: Any) -> int:
        for i, known in enumerate(self.operands):
            if known is x:
                return i
        self.operands.append(x)
        return len(self.operands) - 1

    def add(self, params: dict, operands: Sequence[Any]) -> list[Later]:
        """One more launch, whose operands are arrays or come from this chain."""
        from jaxkern.gpu.peer_sum import Mailbox

        sources: list[Any] = []
        for x in operands:
            if isinstance(x, Mailbox):
                sources.append((False, -1 - x.number, 0))
            elif isinstance(x, Later):
                [(result, first, _)] = x.pieces
                sources.append((True, result, first * x.dtype.itemsize))
            else:
                sources.append((False, self.operand(x), 0))
        first = len(self.results)
        for operand, result in params["aliases"]:
            self.aliases.append((sources[operand][1], first + result))
            self.written.add(sources[operand][1])
        self.results += params["out"]
        sources += [(True, first + i, 0) for i in range(len(params["out"]))]
        self.steps.append((params["launch"], sources))
        return [
            Later(self, ((first + i, 0, math.prod(shape)),), shape, jnp.dtype(dtype))
            for i, (shape, dtype) in enumerate(params["out"])
        ]

    def bind(self) -> None:
        from jaxkern.gpu.launch_chain import Step, launch_chain_p
        from jaxkern.gpu.peer_sum import in_turn
        from jaxkern.gpu.triton_call import triton_call_p

        mailboxes = any(at < 0 for _, sources in self.steps for _, at, _ in sources)
        if len(self.steps) == 1 and not mailboxes:
            params = dict(launch=self.steps[0][0], out=tuple(self.results))
            order = [at for own, at, _ in self.steps[0][1] if not own]
            aliases = tuple((order.index(i), j) for i, j in self.aliases)
            operands = [self.operands[at] for at in order]
            self.made = triton_call_p.bind(*operands, aliases=aliases, **params)
            return
        n = len(self.operands)
        steps = tuple(
            Step(launch, tuple((n * own + at, offset) for own, at, offset in sources))
            for launch, sources in (in_turn(self.steps) if mailboxes else self.steps)
        )
        self.made = launch_chain_p.bind(
            *self.operands,
            steps=steps,
            out=tuple(self.results),
            aliases=tuple(self.aliases),
            peers=self.peers if mailboxes else None,
        )

    def value(self, later: Later) -> jax.Array:
        assert self.made is not None
        flat = []
        for result, first, count in later.pieces:
            x = self.made[result]
            whole = count == x.size
            flat.append(x if whole else x.reshape(-1)[first : first + count])
        if len(flat) > 1:
            flat = [jnp.concatenate([x.reshape(-1) for x in flat])]
        return flat[0].reshape(later.shape)


class Chains:
    """Follows equations and gathers their launches."""

    def __init__(self, peers: "Peers | None" = None) -> None:
        self.peers = peers
        self.chain = Chain(peers)

    def evaluate(self, closed: Any, args: Sequence[Any]) -> list:
        """Results, some of which may be `Later`."""
        jaxpr = closed.jaxpr
        known = [*closed.consts, *args]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], known, strict=True))
        for eqn in jaxpr.eqns:
            operands = [
                v.val if isinstance(v, Literal) else values[v] for v in eqn.invars
            ]
            out = self.equation(eqn, operands)
            values.update(zip(eqn.outvars, out, strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list) -> list:
        from jaxkern.gpu.launch_chain import fits
        from jaxkern.gpu.triton_call import triton_call_p

        p, params = eqn.primitive, dict(eqn.params)
        if p is triton_call_p and fits(params["launch"]):
            return self.launch(params, operands)
        if self.peers and sums_over(eqn, self.peers.axis_name):
            return self.sum_of_peers(eqn, operands)
        if isinstance(p, KernelPrimitive) and (inner := kernel_of(eqn)):
            return self.evaluate(inner, operands)
        waits = any(isinstance(x, Later) for x in operands)
        if (name := INLINED.get(p.name)) and (waits or has_kernels(params[name])):
            return self.evaluate(params[name], operands)
        if waits and (seen := view(eqn, operands)):
            return seen
        out = p.bind(*self.finished(operands), **params)
        return list(out) if p.multiple_results else [out]

    def launch(self, params: dict, operands: list) -> list:
        aliased = {operand for operand, _ in params["aliases"]}
        if any(isinstance(operands[i], Later) for i in aliased) or any(
            x is self.chain.operands[i] for i in self.chain.written for x in operands
        ):
            operands = self.finished(operands, end=True)
        elif not all(is_aligned(x) for x in operands if isinstance(x, Later)):
            operands = self.finished(operands)
        else:  # what an earlier chain left
            operands = [
                x.chain.value(x) if isinstance(x, Later) and x.chain.made else x
                for x in operands
            ]
        return self.chain.add(params, operands)

    def sum_of_peers(self, eqn: Any, operands: list) -> list:
        """`sum_over_devices` by `gpu/peer_sum.py`."""
        from jaxkern.gpu import peer_sum

        assert self.peers is not None
        avals, [out] = [v.aval for v in eqn.invars], eqn.outvars
        x, *residual = avals
        launch = peer_sum.launch(x, next(iter(residual), None), out.aval, self.peers)
        shapes = ((out.aval.shape, out.aval.dtype),)
        return self.launch(
            {"launch": launch, "out": shapes, "aliases": ()},
            [*operands, *peer_sum.mailboxes(self.peers)],
        )

    def finished(self, values: Sequence[Any], end: bool = False) -> list:
        """Arrays; the chain ends where they need it, or at once."""
        needed = any(isinstance(x, Later) and x.chain.made is None for x in values)
        if (needed or end) and self.chain.steps:
            self.chain.bind()
            self.chain = Chain(self.peers)
        return [x.chain.value(x) if isinstance(x, Later) else x for x in values]


def is_aligned(x: Later) -> bool:
    """Whether a kernel can read it where it is."""
    return len(x.pieces) == 1 and x.pieces[0][1] * x.dtype.itemsize % ALIGNED == 0


def kernel_of(eqn: Any) -> Any:
    """What an op lowers to on a GPU, or None where that is no Triton kernel."""
    avals = [v.aval for v in eqn.invars]
    return kernel_jaxpr(eqn.primitive, avals, **eqn.params)


def sums_over(eqn: Any, axis_name: str) -> bool:
    """Whether it is a `sum_over_devices` over that axis which fits into mailboxes."""
    from jaxkern.gpu.peer_sum import MOST

    if eqn.primitive.name != "jit" or eqn.params["name"] != SUM:
        return False
    sums = [e for e in eqn.params["jaxpr"].jaxpr.eqns if e.primitive.name == "psum"]
    [out] = eqn.outvars
    fits = 0 < out.aval.size <= MOST and all(
        v.aval.dtype.itemsize <= 4 for v in (*eqn.invars, out)
    )
    return fits and [e.params["axes"] for e in sums] == [(axis_name,)]


def has_kernels(closed: Any) -> bool:
    from jaxkern.gpu.triton_call import triton_call_p

    return any(
        eqn.primitive is triton_call_p or isinstance(eqn.primitive, KernelPrimitive)
        for eqn in every_equation(closed.jaxpr)
    )


def view(eqn: Any, operands: list) -> list[Later] | None:
    """The results of an equation that computes nothing, or None."""
    name, params = eqn.primitive.name, eqn.params
    if name == "optimization_barrier":
        return operands
    shapes = [v.aval.shape for v in eqn.outvars]
    if name == "concatenate":
        if not all(isinstance(x, Later) for x in operands) or not alone(
            shapes[0], params["dimension"]
        ):
            return None
        if len({id(x.chain) for x in operands}) > 1:
            return None
        pieces = tuple(piece for x in operands for piece in x.pieces)
        return [operands[0]._replace(pieces=pieces, shape=shapes[0])]
    x = operands[0]
    if not isinstance(x, Later):
        return None
    adds_ones = name == "broadcast_in_dim" and math.prod(shapes[0]) == math.prod(
        x.shape
    )
    if name in ("reshape", "squeeze", "expand_dims") or adds_ones:
        return [x._replace(shape=shapes[0])]
    if name == "convert_element_type" and params["new_dtype"] == x.dtype:
        return [x]
    if name == "split" and alone(x.shape, params["axis"]):
        return parts(x, shapes)
    if name == "slice" and params["strides"] is None:
        starts = params["start_indices"]
        cut = [i for i, n in enumerate(shapes[0]) if n != x.shape[i]]
        if len(cut) == 1 and alone(x.shape, cut[0]):
            start = starts[cut[0]] * math.prod(x.shape[cut[0] + 1 :])
            pieces = x.elements(start, math.prod(shapes[0]))
            return [x._replace(pieces=pieces, shape=shapes[0])]
    return None


def alone(shape: Sequence[int], axis: int) -> bool:
    """Whether slices along the axis are contiguous."""
    return all(n == 1 for n in shape[:axis])


def parts(x: Later, shapes: Sequence[tuple[int, ...]]) -> list[Later]:
    found, start = [], 0
    for shape in shapes:
        pieces = x.elements(start, math.prod(shape))
        found.append(x._replace(pieces=pieces, shape=shape))
        start += math.prod(shape)
    return found


chained_p.def_impl(evaluate)
chained_p.def_abstract_eval(lambda *_, jaxpr, peers: list(jaxpr.out_avals))
batching.primitive_batchers[chained_p] = batch
mlir.register_lowering(chained_p, mlir.lower_fun(evaluate, multiple_results=True))
mlir.register_lowering(chained_p, lower_on_gpu, platform="cuda")
