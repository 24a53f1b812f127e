"""One token of a gated delta net: convolution, gates, state and norm in one launch.

Few heads have a cluster of programs each, many one program a head.
"""

from typing import Any

import jax

from jaxkern.gpu.cluster import (
    MAX_PROGRAMS,
    OLDEST_WITH_CLUSTERS,
    exchange_bytes,
)
from jaxkern.gpu.device import WARP, compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.delta_rule.gated_delta_net_step import KEY_EPS, key_heads
from jaxkern.triton.delta_rule.gated_delta_net_step_kernel import (
    gated_delta_net_step_kernel,
)

WIDEST = 1024  # value dims of a head: a program has whole rows of the state
NARROWEST = 32  # value dims of a program of a cluster: a line of the state


def unsupported(state: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if (hv := state.shape[-1]) > WIDEST:
        return f"values of {hv} dims, above {WIDEST}, fill no program"
    return unsupported_anywhere(state=state, **rest)


def programs_of_head(heads: int, hv: int) -> int:
    """As many as multiprocessors are there for, by powers of 2."""
    if compute_capability() < OLDEST_WITH_CLUSTERS:
        return 1
    programs = min(max(next_power_of_2(hv) // NARROWEST, 1), MAX_PROGRAMS)
    while programs > 1 and heads * programs > num_sms():
        programs //= 2
    return programs


def tile_sizes(h: int, hv: int, itemsize: int, programs: int = 1) -> dict:
    """As few threads as a vector has numbers, of the state at most 128 each.

    Where there are more Triton has every thread load whole vectors, tap by tap: of a
    state of 128 x 128 in 16 warps 183 loads a thread, which took 13.5 us on an H200.
    A narrow state is kept beside its float32 numbers: half the rows at a time.
    """
    rows, columns = next_power_of_2(h), next_power_of_2(hv) // programs
    least = min(rows, 256) if programs > 1 else min(rows, columns, 128)
    warps = max(1, least // WARP) if columns <= 128 else 8
    numbers = (2**12 * warps if columns <= 128 else 2**13) * itemsize // 4
    rows = max(1, min(rows, numbers // columns))
    exchange = exchange_bytes(MAX_PROGRAMS) if programs > 1 else 0
    return {
        "BLOCK_H": rows,
        "BLOCK_V": columns,
        "CLUSTER": programs,
        "EXCHANGE": exchange,
        "cluster": programs,
        "num_warps": warps,
    }


def gated_delta_net_step(
    qkv: jax.Array,
    gate: jax.Array,
    write: jax.Array,
    rate: jax.Array,
    weight: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    inputs: jax.Array,
    state: jax.Array,
    counts: jax.Array | None,
    *,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    b, n, h, hv = state.shape
    sizes = tile_sizes(h, hv, state.dtype.itemsize, programs_of_head(b * n, hv))
    given = {
        "qkv_ptr": qkv,
        "gate_ptr": gate,
        "write_ptr": write,
        "rate_ptr": rate,
        "taps_ptr": weight,
        "a_log_ptr": a_log,
        "dt_bias_ptr": dt_bias,
        "norm_ptr": norm,
        "inputs_ptr": inputs,
        "state_ptr": state,
        "counts_ptr": counts,
    }
    results = {"out_ptr": like(gate), "after_ptr": like(inputs), "new_ptr": like(state)}
    return sparse_call(
        gated_delta_net_step_kernel,
        (b * n * sizes["CLUSTER"],),
        given,
        results,
        {
            "N": n,
            "K": key_heads("gated_delta_net_step", qkv.shape[1], n, h, hv),
            "H": h,
            "HV": hv,
            "PAST": inputs.shape[1],
            "SCALE": h**-0.5,
            "EPS": eps,
            "KEY_EPS": KEY_EPS,
            **sizes,
        },
        in_place={"state_ptr": "new_ptr"},
    )
