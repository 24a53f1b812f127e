"""One token of a gated delta net: by one op, by its operators one by one, and by XLA.

States are donated as in a decode loop. An executable makes STEPS steps over several
layers in turn, whose states together overfill the L2, and writes each where it was; the
result of a step goes into the gate of the layer's next. A time is the device's, of one
step of a layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import L2_BYTES
from benchmarks.delta_rule.gated_delta_step import STEPS, H, Steps, compare

NAME = "gated_delta_net_step"
TAPS = 4
CASES = {  # name: sequences, key heads, value heads
    "B1 k16 n32 128x128": (1, 16, 32),
    "B8 k16 n32 128x128": (8, 16, 32),
    "B32 k16 n32 128x128": (32, 16, 32),
}


def operands(b: int, k: int, n: int) -> tuple[list, list]:
    """The token and the weights of each layer, and its two states."""
    c, size = (2 * k + n) * H, 4 * b * n * H * H
    layers = max(4, min(64, int(3 * L2_BYTES / size) + 1))

    @jax.jit
    def draw(key):
        keys = iter(jax.random.split(key, 8))

        def normal(*shape, dtype: Any = jnp.float32):
            return jax.random.normal(next(keys), shape, dtype)

        gates = normal(2, b, n, dtype=jnp.bfloat16)
        token = normal(b, c, dtype=jnp.bfloat16), normal(b, n, H, dtype=jnp.bfloat16)
        weights = normal(c, TAPS), normal(n) / 4, jnp.ones(n), jnp.ones(H)
        return (*token, *gates, *weights), (normal(b, TAPS - 1, c), normal(b, n, H, H))

    pairs = [draw(key) for key in jax.random.split(jax.random.key(0), layers)]
    tokens, states = zip(*pairs, strict=True)
    return list(tokens), list(states)


def one_by_one(qkv, gate, write, rate, weight, a_log, dt_bias, norm, inputs, state):
    """The operators that the op stands for."""
    (b, n, h, _), c = state.shape, qkv.shape[1]
    k = (c // h - n) // 2
    mixed, inputs = jaxkern.causal_conv1d_step(
        qkv, weight, None, inputs, activation="silu"
    )
    query, key, value = jnp.split(mixed, (k * h, 2 * k * h), axis=1)
    query, key = (jaxkern.l2_norm(y.reshape(b, k, h)) for y in (query, key))
    g, beta = jaxkern.compute_g_beta(rate, write, a_log, dt_bias)
    token = query, key, value.reshape(b, n, h), g, beta
    y, state = jaxkern.gated_delta_step(*token, state)
    return jaxkern.gated_rms_norm(y, gate, norm), inputs, state


def steps(rule: Callable, backend: str, tokens: list, states: list):
    """All results and the new states."""
    outs = []
    with jaxkern.backend(backend):
        for _ in range(STEPS):
            for i, (qkv, gate, *rest) in enumerate(tokens):
                out, *after = rule(qkv, gate, *rest, *states[i])
                states[i], tokens[i] = tuple(after), (qkv, out, *rest)
                outs.append(out)
    return outs, states


def bytes_moved(b: int, k: int, n: int) -> float:
    """Both states read and written; the token, the weights and the result."""
    c = (2 * k + n) * H
    state = 4.0 * b * (n * H * H + (TAPS - 1) * c)
    return 2 * state + 2.0 * b * (c + 2 * n * H + 2 * n) + 4.0 * c * TAPS


def programs_of(case: str) -> dict[str, Steps]:
    tokens, states = operands(*CASES[case])
    rules = {
        "jaxkern": (jaxkern.gated_delta_net_step, "auto"),
        "one by one": (one_by_one, "auto"),
        "XLA": (one_by_one, "xla"),
    }
    return {
        who: Steps.of(functools.partial(steps, *rule), tokens, states)
        for who, rule in rules.items()
    }


def main(arguments):
    moved = {case: bytes_moved(*CASES[case]) for case in CASES}
    return compare(NAME, moved, programs_of, arguments)
