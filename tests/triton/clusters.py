"""Programs of a cluster in Triton's interpreter, which knows none.

Programs write to a dictionary in place of each other's memory, and all of them run
again for each exchange: then each finds what all have sent in it.
"""

from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.attention.decode import decode_kernel
from tests.triton.interpreted import interpreted


class Exchange:
    """The shared memory of a launch: by program, exchange and address."""

    def __init__(self, cluster: int):
        self.cluster, self.numbers, self.exchanges = cluster, {}, 0

    def program(self) -> int:
        from triton.runtime.interpreter import interpreter_builder

        return interpreter_builder.grid_idx[0]

    def exchange_memory(self, size):
        del size
        self.exchanges = 0
        return 0

    def nothing(self):
        pass

    def all_have_sent(self):
        self.exchanges += 1

    def send(self, at, rank, x, mask):
        first = self.program() // self.cluster * self.cluster
        whole = np.broadcast_arrays(*map(numbers, (at, rank, x, mask)))
        for place, peer, number, there in zip(*(a.ravel() for a in whole), strict=True):
            if there:
                at = first + int(peer), self.exchanges, int(place)
                self.numbers[at] = number

    def receive(self, at):
        from triton.language import core
        from triton.runtime.interpreter import TensorHandle

        places, now = numbers(at), self.exchanges - 1
        found = [
            self.numbers.get((self.program(), now, int(i)), np.nan)
            for i in places.ravel()
        ]
        data = np.array(found, np.float32).reshape(places.shape)
        kind = core.block_type(core.float32, list(places.shape))
        return core.tensor(TensorHandle(data, core.float32), kind)


def numbers(x):
    return np.asarray(x.handle.data if hasattr(x, "handle") else getattr(x, "value", x))


def in_a_cluster(
    monkeypatch: Any, f: Any, *operands: Any, kernel: ModuleType = decode_kernel
) -> tuple[Any, list]:
    """f as its launch computes it, and (cluster, constants) of each launch.

    `kernel` has the kernel; its shares are merged as decode_kernel.py does it.
    """
    once, launches = bridge.triton_call, []

    def again(*args, cluster=1, **constants):
        launches.append((cluster, constants))
        exchange = Exchange(cluster)
        monkeypatch.setattr(kernel, "exchange_memory", exchange.exchange_memory)
        for module in (decode_kernel, kernel):
            for name in ("peers_have_begun", "all_have_sent", "send", "receive"):
                if hasattr(module, name):
                    put = getattr(exchange, name, exchange.nothing)
                    monkeypatch.setattr(module, name, put)
        out = interpreted_call(*args, **constants)
        jax.block_until_ready(out)
        for _ in range(exchange.exchanges):
            out = jax.block_until_ready(interpreted_call(*args, **constants))
        return out

    with interpreted(), compiling_for(90):
        interpreted_call = bridge.triton_call
        bridge.triton_call = again
        try:
            out = f(*operands)
        finally:
            bridge.triton_call = interpreted_call
    assert bridge.triton_call is once
    return out, launches
