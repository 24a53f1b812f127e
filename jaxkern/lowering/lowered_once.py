"""A function that is lowered once for all the places where one module calls it.

XLA's partitioner asks for the shards' computation at every call of an operator, and JAX
traces and lowers it again each time: a second or two for a kernel of Mosaic, whose
bytes then differ from one lowering to the next, so that XLA also compiles it again. Of
24 layers that are minutes. Here the first lowering is kept as bytes of MLIR, and what
the others get is equal to the last byte.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkern.primitives.call import NO_MESH


class LoweredOnce:
    """`f` for arrays of these shapes and dtypes, traced now and lowered when needed."""

    def __init__(self, name: str, f: Callable, arrays: Sequence[Any]):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        self.name = name
        self.traced = jax.make_jaxpr(f)(*shapes)
        self.modules: dict[tuple[str, ...], bytes] = {}

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return lowered_once_p.bind(*self.traced.consts, *arrays, lowered=self)

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        num_consts = len(self.traced.consts)
        return eval_jaxpr(self.traced.jaxpr, arrays[:num_consts], *arrays[num_consts:])

    def module(self, platforms: Sequence[str]) -> bytes:
        key = tuple(platforms)
        if key not in self.modules:
            arrays = [*map(jax.typeof, self.traced.consts), *self.traced.in_avals]
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
            with jax.sharding.use_abstract_mesh(NO_MESH):  # whatever mesh is set
                made = jax.jit(self.run, keep_unused=True).trace(*shapes)
                lowered = made.lower(lowering_platforms=key)
            self.modules[key] = mlir.module_to_bytecode(
                cast(Any, lowered.compiler_ir())
            )
        return self.modules[key]


def abstract_results(*avals: Any, lowered: LoweredOnce) -> list[ShapedArray]:
    return cast(list[ShapedArray], lowered.traced.out_avals)


def call_of_module(ctx, *values, lowered: LoweredOnce):
    platforms = ctx.platforms or ctx.module_context.platforms
    module = mlir.ir.Module.parse(lowered.module(platforms))
    main = mlir.ir.SymbolTable(module.operation)["main"]
    types = cast(Any, main.attributes["function_type"]).value.results
    name = mlir.merge_mlir_modules(
        ctx.module_context.module,
        lowered.name,
        module,
        dst_symtab=ctx.module_context.symbol_table,
    )
    callee: dict[str, mlir.ir.Attribute] = {
        "callee": mlir.ir.FlatSymbolRefAttr.get(name)
    }
    call = mlir.ir.Operation.create("func.call", types, values, callee)
    return call.results


lowered_once_p = Primitive("lowered_once")
lowered_once_p.multiple_results = True
lowered_once_p.def_abstract_eval(abstract_results)
lowered_once_p.def_impl(lambda *arrays, lowered: lowered.run(*arrays))
mlir.register_lowering(lowered_once_p, call_of_module)


def once_a_shape(name: str, f: Callable) -> Callable:
    """`f`, whose calls with equal shapes and dtypes share one lowering."""

    @functools.cache
    def kept(*kinds: tuple) -> LoweredOnce:
        return LoweredOnce(name, f, [jax.ShapeDtypeStruct(*kind) for kind in kinds])

    return lambda *arrays: kept(*((x.shape, x.dtype) for x in arrays))(*arrays)
