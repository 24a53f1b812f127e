"""jaxkern: the operators of today's models as JAX primitives with every rule.

Each op differentiates in both modes to any order, batches, checkpoints and
shards, and lowers on every platform. Where to look:

    primitives/   what each op means, one file an op: formula, docs, reference, gradient
    cpu/          C++ kernels for CPUs
    triton/       kernels for every CUDA GPU from sm_80 on
    pallas/       kernels for Hopper and newer
    gpu/          what both share: the device, launches, the problem of an attention
    lowering/     what runs where: one line per kernel in cpu.py, cuda.py, apple/
    interop/      other libraries' names and signatures: jax.nn, Flax, tokamax
    parallel/     operators over a sequence that several devices have in shards
    formats/      files to pytrees of arrays and quantised containers
    runtime/      compiled functions in view and in bounds: plans, limits, uploads
    testing/      the generic checks that every op passes, for ops of others too
    models/       whole models as pure functions, `generate`, the command line
    train/        a training step, its loss and optimiser; loaded when first named
"""

import importlib as _importlib
import typing as _typing

from jaxkern.quick_import import quick_import as _quick_import

with _quick_import():
    # `import ... as`: type checkers read `_norm.__all__` of these alone
    import jaxkern.parallel as _parallel
    import jaxkern.primitives.activation as _activation
    import jaxkern.primitives.attention as _attention
    import jaxkern.primitives.delta_rule as _delta_rule
    import jaxkern.primitives.index as _index
    import jaxkern.primitives.kv_cache as _kv_cache
    import jaxkern.primitives.linear as _linear
    import jaxkern.primitives.loss as _loss
    import jaxkern.primitives.moe as _moe
    import jaxkern.primitives.norm as _norm
    import jaxkern.primitives.optim as _optim
    import jaxkern.primitives.quant as _quant
    import jaxkern.primitives.rope as _rope
    import jaxkern.primitives.sampling as _sampling
    import jaxkern.primitives.signal as _signal
    import jaxkern.primitives.turboquant as _turboquant
    import jaxkern.primitives.vision as _vision
    from jaxkern.lowering import cpu as _cpu
    from jaxkern.lowering import cuda as _cuda
    from jaxkern.lowering.apple import rows as _apple
    from jaxkern.lowering.explain import explain
    from jaxkern.lowering.lower import backend
    from jaxkern.lowering.tuned import tuned
    from jaxkern.parallel import *
    from jaxkern.primitives.activation import *
    from jaxkern.primitives.attention import *
    from jaxkern.primitives.delta_rule import *
    from jaxkern.primitives.index import *
    from jaxkern.primitives.kv_cache import *
    from jaxkern.primitives.linear import *
    from jaxkern.primitives.loss import *
    from jaxkern.primitives.moe import *
    from jaxkern.primitives.norm import *
    from jaxkern.primitives.optim import *
    from jaxkern.primitives.quant import *
    from jaxkern.primitives.rope import *
    from jaxkern.primitives.sampling import *
    from jaxkern.primitives.signal import *
    from jaxkern.primitives.turboquant import *
    from jaxkern.primitives.vision import *

__all__ = ["backend", "explain", "tuned"]
__all__ += _activation.__all__
__all__ += _attention.__all__
__all__ += _delta_rule.__all__
__all__ += _index.__all__
__all__ += _kv_cache.__all__
__all__ += _linear.__all__
__all__ += _loss.__all__
__all__ += _moe.__all__
__all__ += _norm.__all__
__all__ += _optim.__all__
__all__ += _parallel.__all__
__all__ += _quant.__all__
__all__ += _rope.__all__
__all__ += _sampling.__all__
__all__ += _signal.__all__
__all__ += _turboquant.__all__
__all__ += _vision.__all__


if _typing.TYPE_CHECKING:  # which take a `__getattr__` to have every name
    from jaxkern import train as train
else:

    def __getattr__(name: str):
        """`jaxkern.train`, which imports models, when it is first named."""
        if name == "train":
            return _importlib.import_module("jaxkern.train")
        raise AttributeError(f"module 'jaxkern' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "train"})
