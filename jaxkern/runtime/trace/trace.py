"""`trace`: a function as a list of operations over numbered slots, and as a plan.

The slots of frozen values (weights) come first, then those of the arguments, then one
for each result. What runs Python or foreign code is opaque: found wherever it hides,
and refused by a plan unless allowed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import DropVar, Literal, jaxprs_in_params

from jaxkern.runtime.graph.op_kind import Jaxpr, JaxprEqn, foreign_effect
from jaxkern.runtime.graph.replay import opened

OPAQUE = ("pure_callback", "io_callback", "debug_callback", "debug_print", "ffi_call")


@dataclasses.dataclass(frozen=True)
class TracedOp:
    """One operation.

    Attributes:
      name: of the primitive.
      inputs: its slots, None where a constant of `constants` stands.
      outputs: the slots it fills.
      params: the parameters of the primitive.
      constants: numbers among the operands, by position.
    """

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any] = dataclasses.field(repr=False)
    constants: dict[int, Any]


@dataclasses.dataclass(frozen=True)
class OpaqueOp:
    """Work that cannot be seen into.

    Attributes:
      name: of the primitive.
      calls: the Python function or the foreign target that runs.
      inside: the path of loops, branches and calls to it, "" at the top.
    """

    name: str
    calls: str
    inside: str

    def __str__(self) -> str:
        where = f" inside {self.inside}" if self.inside else ""
        return f"{self.name} of {self.calls}{where}"


@dataclasses.dataclass(frozen=True)
class TracedPlan:
    """A trace as something that runs: one jitted function with its weights bound.

    Attributes:
      instructions: the operations in order.
      slot_shapes: shape and dtype of each slot.
    """

    instructions: tuple[TracedOp, ...]
    slot_shapes: tuple[jax.ShapeDtypeStruct, ...]
    _run: Callable = dataclasses.field(repr=False)

    def run(self, *args: Any) -> Any:
        """The results for these arguments, without those that are frozen as a whole."""
        return self._run(*args)

    __call__ = run


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What a function does, over slots. Made by `trace`; immutable.

    Attributes:
      ops: the operations in order.
      slot_shapes: shape and dtype of each slot.
      frozen_slots: the slots of frozen values: the first ones.
      input_slots: the slot of each array of the arguments, frozen ones included.
      output_slots: the slot of each array of the results, None for a constant.
      opaque_ops: the work that cannot be seen into, also in bodies.
    """

    ops: tuple[TracedOp, ...]
    slot_shapes: tuple[jax.ShapeDtypeStruct, ...]
    frozen_slots: tuple[int, ...]
    input_slots: tuple[int, ...]
    output_slots: tuple[int | None, ...]
    opaque_ops: tuple[OpaqueOp, ...]
    _jaxpr: Jaxpr = dataclasses.field(repr=False)
    _args: tuple = dataclasses.field(repr=False)
    _frozen: Any = dataclasses.field(repr=False)  # kept alive: slots go by identity
    _out_tree: Any = dataclasses.field(repr=False)
    _slot_of: dict[int, int] = dataclasses.field(repr=False)

    @property
    def slots(self) -> range:
        """Every slot."""
        return range(len(self.slot_shapes))

    @property
    def next_slot(self) -> int:
        """The number of slots."""
        return len(self.slot_shapes)

    @property
    def has_opaque_ops(self) -> bool:
        return bool(self.opaque_ops)

    def slot_for(self, x: Any) -> int:
        """The slot of an argument or frozen value: of this very object.

        Raises:
          KeyError: it is neither.
        """
        if id(x) not in self._slot_of:
            raise KeyError("slot_for: neither an argument nor a frozen value")
        return self._slot_of[id(x)]

    def to_plan(self, *, allow_opaque: bool = False) -> TracedPlan:
        """A plan that runs the operations.

        Arguments whose arrays are all frozen are bound: `run` takes the others.

        Args:
          allow_opaque: also plan what cannot be seen into.

        Raises:
          ValueError: there are opaque operations; or a bound argument has no values.
        """
        if self.opaque_ops and not allow_opaque:
            found = "; ".join(map(str, self.opaque_ops))
            raise ValueError(
                f"to_plan: the trace has opaque work: {found}. Take it out of the "
                "function, or pass allow_opaque=True."
            )
        frozen = set(self.frozen_slots)
        slots = iter(self.input_slots)
        bound = [
            all(next(slots) in frozen for _ in leaves) and bool(leaves)
            for leaves in ([*jax.tree.leaves(arg)] for arg in self._args)
        ]
        weights = [arg for arg, b in zip(self._args, bound, strict=True) if b]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(weights)):
            raise ValueError(
                "to_plan: a frozen argument has no values. Trace with arrays."
            )
        jaxpr, tree = self._jaxpr, jax.tree.structure(self._args)
        shapes = [v.aval for v in jaxpr.invars]

        @jax.jit
        def call(weights, others):
            kept, given = iter(weights), iter(others)
            args = [next(kept) if b else next(given) for b in bound]
            flat, got = jax.tree.flatten(tuple(args))
            if got != tree:
                raise TypeError(f"run: the plan is for arguments {tree}, got {got}.")
            for v, x in zip(shapes, flat, strict=True):
                if (v.shape, v.dtype) != (x.shape, x.dtype):
                    raise TypeError(f"run: the plan is for {v}, got {jax.typeof(x)}.")
            out = eval_jaxpr(jaxpr, jaxpr.consts, *flat)
            return jax.tree.unflatten(self._out_tree, list(out))

        def run(*others):
            if len(others) != bound.count(False):
                raise TypeError(
                    f"run: takes {bound.count(False)} arguments, got {len(others)}; "
                    "those that are frozen as a whole are bound."
                )
            return call(weights, others)

        return TracedPlan(self.ops, self.slot_shapes, run)


def trace(f: Callable, *args: Any, frozen: Any = ()) -> Trace:
    """Records what `f(*args)` does, over slots; runs nothing.

    Everything is recorded, also what fills, copies, scatters or draws random numbers.
    Calls of plain `jit` are opened.

    Args:
      f: any traceable function.
      args: its arguments: arrays, `jax.ShapeDtypeStruct`, pytrees of them.
      frozen: pytree of the weights: the very objects among `args`, or jax arrays that
        `f` closes over. An object that occurs twice has one slot. What else `f` closes
        over is frozen too.

    Returns:
      The trace.

    Example:
      >>> from jaxkern import runtime
      >>> found = runtime.trace(lambda x: jaxkern.rms_norm(x) + x, jnp.ones((2, 8)))
      >>> [(op.name, op.inputs, op.outputs) for op in found.ops]
      [('rms_norm', (0,), (1,)), ('add', (1, 0), (2,))]
    """
    jaxpr, out_shape = jax.make_jaxpr(f, return_shape=True)(*args)
    jaxpr = opened(jaxpr)
    slot_of: dict[int, int] = {}
    for x in (*jax.tree.leaves(frozen), *jaxpr.consts):
        slot_of.setdefault(id(x), len(slot_of))
    shapes = [struct(jax.typeof(x)) for x in unique(frozen, jaxpr.consts)]
    frozen_slots = tuple(range(len(shapes)))
    slots: dict[Any, int] = {}

    def fill(v: Any) -> int:
        slots[v] = len(shapes)
        shapes.append(struct(v.aval))
        return slots[v]

    leaves = jax.tree.leaves(args)
    for v, x in zip(jaxpr.invars, leaves, strict=True):
        if id(x) in slot_of and slot_of[id(x)] in frozen_slots:
            slots[v] = slot_of[id(x)]
        else:
            slot_of[id(x)] = fill(v)
    slots.update(
        (v, slot_of[id(x)]) for v, x in zip(jaxpr.constvars, jaxpr.consts, strict=True)
    )
    ops = [traced_op(eqn, slots, fill) for eqn in jaxpr.eqns]
    return Trace(
        tuple(ops),
        tuple(shapes),
        frozen_slots,
        tuple(slots[v] for v in jaxpr.invars),
        tuple(None if isinstance(v, Literal) else slots[v] for v in jaxpr.outvars),
        tuple(opaque_ops(jaxpr)),
        jaxpr,
        args,
        frozen,
        jax.tree.structure(out_shape),
        slot_of,
    )


def unique(frozen: Any, consts: Sequence[Any]) -> list[Any]:
    """Each frozen object once, in order."""
    return list({id(x): x for x in (*jax.tree.leaves(frozen), *consts)}.values())


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def traced_op(eqn: JaxprEqn, slots: dict, fill: Callable) -> TracedOp:
    constants = {k: v.val for k, v in enumerate(eqn.invars) if isinstance(v, Literal)}
    inputs = tuple(None if isinstance(v, Literal) else slots[v] for v in eqn.invars)
    outputs = tuple(fill(v) for v in eqn.outvars if not isinstance(v, DropVar))
    return TracedOp(eqn.primitive.name, inputs, outputs, eqn.params, constants)


def opaque_ops(jaxpr: Jaxpr, inside: str = "") -> Iterator[OpaqueOp]:
    """Callbacks, foreign calls and effects that are not JAX's own, also in bodies."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = list(jaxprs_in_params(eqn.params))
        for body in inner:
            yield from opaque_ops(body, f"{inside}/{name}".lstrip("/"))
        if name in OPAQUE or (not inner and foreign_effect(eqn)):
            yield OpaqueOp(name, callee(eqn), inside)


def callee(eqn: JaxprEqn) -> str:
    """The name of what an opaque equation calls."""
    for key in ("target_name", "fmt"):
        if key in eqn.params:
            return repr(eqn.params[key])
    called = eqn.params.get("callback")
    called = getattr(called, "callback_func", called)
    while str(getattr(called, "__module__", "")).startswith("jax."):
        cells = getattr(called, "__closure__", None) or ()  # jax wraps what it calls
        wrapped = [c.cell_contents for c in cells if callable(c.cell_contents)]
        if not wrapped:
            break
        called = wrapped[0]
    return getattr(called, "__qualname__", repr(called))
