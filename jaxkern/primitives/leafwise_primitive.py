"""`leafwise_primitive`: an op of one array as one equation over all leaves of pytrees.

One launch can then serve hundreds of leaves. An operand of the op with leading dims
`...` becomes a list with an array per leaf, any other operand is shared by all leaves:

    adamw_tree_p = leafwise_primitive(adamw_p)
    params, m, v = adamw_tree_p(params, grads, m, v, learning_rate, step, b1=...)

Every rule follows from the op of one leaf: the reference binds it leaf by leaf. Leaves
are independent: each is cut its own way over a mesh.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxkern.primitives.call import Call, apply_call, backend_context, same_manual_axes
from jaxkern.primitives.declared_dims import (
    Annotated,
    as_array,
    check_dims,
    check_static,
)
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import register

LEAFWISE: dict[str, "LeafwisePrimitive"] = {}  # every declared op over leaves


@dataclasses.dataclass(frozen=True)
class LeavesCall(Call):
    """`ranks` has the number of dims of each leaf."""

    ranks: tuple[int, ...] = ()


class LeafwisePrimitive(KernelPrimitive):
    """`op` on lists of leaves, then shared operands; gives a list for each result.

    A kernel of a row takes and returns the same lists.
    """

    def __init__(self, op: KernelPrimitive):
        super().__init__(op.reference, ())
        self.op = op
        self.name = f"{op.name}_tree"
        self.lists = tuple(a for a in op.operands if a.has_leading)
        self.shared = op.operands[len(self.lists) :]
        declared = (*self.lists, *op.results)
        if any(a.has_leading for a in self.shared) or any(a.labels for a in declared):
            raise TypeError(
                f"{self.name}: {op} must have dims `...` in its first operands and in "
                "all results."
            )
        self.reference = self.leaf_by_leaf

    def leaf_by_leaf(self, *operands: Any, **static: Any) -> tuple[list, ...]:
        n = len(self.lists)
        new = [
            self.op.bind(*leaf, *operands[n:], call=Call(), **static)
            for leaf in zip(*operands[:n], strict=True)
        ]
        return tuple(map(list, zip(*new, strict=True)))

    def __call__(self, *operands: Any, **static: Any) -> tuple[list, ...]:
        n = len(self.lists)
        shared = [
            as_array(self.op.name, a, x)
            for a, x in zip(self.shared, operands[n:], strict=True)
        ]
        leaves = [
            self.checked(leaf, shared) for leaf in zip(*operands[:n], strict=True)
        ]
        if not leaves:
            return tuple([] for _ in self.results)
        check_static(self.op.name, static)
        flat = [x for arrays in zip(*leaves, strict=True) for x in arrays]
        ranks = tuple(first.ndim for first, *_ in leaves)
        call = LeavesCall(backend_context.value, ranks=ranks)
        return self.as_lists(self.bind(*flat, *shared, call=call, **static), len(ranks))

    def checked(self, leaf: Sequence, shared: Sequence) -> list[jax.Array]:
        """The arrays of one leaf, as the op of one leaf checks them."""
        arrays = [
            as_array(self.op.name, a, x) for a, x in zip(self.lists, leaf, strict=True)
        ]
        check_dims(repr(self.op), self.op.operands, [*arrays, *shared])
        every: list[Any] = [*arrays, *shared]
        return same_manual_axes(every)[: len(arrays)]

    def as_lists(self, arrays: Sequence, num_leaves: int) -> tuple[list, ...]:
        return tuple(
            list(arrays[i : i + num_leaves]) for i in range(0, len(arrays), num_leaves)
        )

    def evaluate_with(
        self, fn: Callable, *arrays: Any, call: Call, **static: Any
    ) -> list:
        num_leaves = len(call.ranks)  # pyright: ignore[reportAttributeAccessIssue]
        end = num_leaves * len(self.lists)

        def unbatched(*arrays):
            out = fn(*self.as_lists(arrays[:end], num_leaves), *arrays[end:], **static)
            return [y for leaves in out for y in leaves]

        return apply_call(unbatched, call)(*arrays)

    def array_annotations(
        self, call: Call
    ) -> tuple[Sequence[Annotated], Sequence[Annotated]]:
        ranks = call.ranks  # pyright: ignore[reportAttributeAccessIssue]

        def each_leaf(declared: Sequence[Annotated]) -> list[Annotated]:
            return [
                dataclasses.replace(
                    a,
                    name=f"{a.name}[{k}]",
                    dims=tuple(f"leaf{k}_{i}" for i in range(rank)),
                )
                for a in declared
                for k, rank in enumerate(ranks)
            ]

        return [*each_leaf(self.lists), *self.shared], each_leaf(self.results)


def leafwise_primitive(op: KernelPrimitive) -> LeafwisePrimitive:
    """`op` over all leaves at once; each result has the shape of its leaf."""
    p = LEAFWISE[f"{op.name}_tree"] = LeafwisePrimitive(op)
    register(p)
    return p
