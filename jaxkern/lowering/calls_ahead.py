"""The calls of a lowered function that jax's plugins compile, each beside XLA.

A kernel of Mosaic, and the assembly of one of Triton, is compiled when XLA comes to its
first call: late, one kernel after the other, while XLA waits. The plugins keep what
they compiled by its contents, for the whole process. So a program of one call without
operands, compiled in a thread while XLA still optimises the function, is all that it
takes for the kernel to be there.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
from jax.extend.backend import get_backend
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.stages import Lowered
from jaxlib import xla_client

from jaxkern.lowering.launches_ahead import mosaic_ops, num_processes
from jaxkern.lowering.lowered_ahead import lowered_ahead

TARGETS = ("mosaic_gpu_v2", "triton_kernel_call_ffi")
NOTHING = jax.ShapeDtypeStruct((1,), "uint8")  # a result, so that XLA keeps the call


@contextlib.contextmanager
def calls_compiled_ahead() -> Iterator["CallsAhead"]:
    """Elsewhere than on a GPU, and on a host of one processor, it begins with nothing."""
    if not (count := num_processes()):
        yield CallsAhead(None)
        return
    with ThreadPoolExecutor(count) as workers, lowered_ahead() as add:
        yield CallsAhead(workers, add)


class CallsAhead:
    """Has each distinct call of some targets compiled once, by threads of `workers`.

    Args:
      workers: None for nothing at all.
      add: of `lowered_ahead`.
    """

    def __init__(
        self, workers: Executor | None, add: Callable[..., bytes] | None = None
    ) -> None:
        self.workers, self.add = workers, add
        self.begun: set[tuple] = set()

    def lower_mosaic(self, jaxpr: Any) -> None:
        """Lowers the Mosaic kernels of a function, and begins with them."""
        if self.workers is None or self.add is None:
            return
        for op in mosaic_ops(jaxpr):
            with contextlib.suppress(Exception):  # lowering meets it again
                lowered = self.add(*op)
                with mlir.make_ir_context():
                    self.begin_module(ir.Module.parse(lowered))

    def begin(self, lowered: Lowered) -> Lowered:
        """Of a function that is lowered for the first device, which is returned."""
        if self.workers is not None:
            self.begin_module(lowered.compiler_ir())
        return lowered

    def begin_module(self, module: Any) -> None:
        assert self.workers is not None
        for target, attributes in calls_of(module, TARGETS):
            key = target, *attributes.items()
            if key not in self.begun:
                self.begun.add(key)
                self.workers.submit(compile_call, target, attributes)


def calls_of(
    module: Any, targets: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Targets and attributes; calls with attributes of other kinds are left to XLA."""
    seen, found = set(), []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in targets and "mhlo.backend_config" in operation.attributes:
                config = operation.attributes["mhlo.backend_config"]
                if config not in seen:  # one object, however often it is written
                    seen.add(config)
                    found.append((target, ir.DictAttr(config)))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for target, config in found:
        attributes = {named.name: value_of(named.attr) for named in config}
        if None not in attributes.values():
            yield target, attributes


def value_of(attribute: Any) -> bytes | bool | None:
    """As `jax.ffi` takes it."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    return None


def program(target: str, attributes: dict[str, Any]) -> Lowered:
    """Of the call alone."""
    call = jax.ffi.ffi_call(target, NOTHING)
    return jax.jit(lambda: call(**attributes)).lower()


def compile_call(target: str, attributes: dict[str, Any]) -> None:
    """Past jax's caches, which have no use for it."""
    with contextlib.suppress(Exception):  # who calls it meets it again
        devices = xla_client.DeviceList((jax.devices()[0],))
        get_backend().compile_and_load(
            program(target, attributes).compiler_ir(),
            executable_devices=devices,
            compile_options=xla_client.CompileOptions(),
        )
