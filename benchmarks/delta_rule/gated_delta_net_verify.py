"""Drafted tokens of a gated delta net: by one op, by XLA, by as many single steps.

Single steps keep the state of the last token alone: of a draft that is rejected they
would have to keep all states, or to run again. What calls leave is donated, several
layers in turn, as in `gated_delta_net_step`; half of the tokens are accepted. A time is
the device's, of one call of a layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import L2_BYTES
from benchmarks.delta_rule.gated_delta_step import STEPS, H, Steps, compare

NAME = "gated_delta_net_verify"
TAPS, K, N = 4, 16, 32  # of the convolution; heads of keys and of values
CASES = {  # name: sequences, tokens
    f"B{b} T{t} k16 n32 128x128": (b, t) for b in (1, 8, 32) for t in (2, 4, 8)
}


def operands(b: int, t: int) -> tuple[list, list]:
    """Tokens and weights of each layer, and what its last call left."""
    c, size = (2 * K + N) * H, 4 * b * N * H * H
    layers = max(4, min(64, int(3 * L2_BYTES / size) + 1))

    @jax.jit
    def draw(key):
        keys = iter(jax.random.split(key, 10))

        def normal(*shape, dtype: Any = jnp.float32):
            return jax.random.normal(next(keys), shape, dtype)

        narrow = functools.partial(normal, dtype=jnp.bfloat16)
        tokens = narrow(b, t, c), narrow(b, t, N, H), *narrow(2, b, t, N)
        weights = normal(c, TAPS), normal(N) / 4, jnp.ones(N), jnp.ones(H)
        left = normal(b, TAPS - 1 + t, c), normal(b, N, H, H)
        left += jaxkern.l2_norm(normal(b, t, N, H)), normal(b, t, N, H)
        return (*tokens, *weights), (*left, -abs(normal(b, t, N)))

    pairs = [draw(key) for key in jax.random.split(jax.random.key(0), layers)]
    tokens, left = zip(*pairs, strict=True)
    return list(tokens), list(left)


def single_steps(qkv, gate, write, rate, *rest):
    """The same tokens by `gated_delta_net_step`, all of them accepted."""
    *weights, inputs, state, keys, corrections, g, _ = rest
    inputs, outs = inputs[:, : TAPS - 1], []
    for i in range(qkv.shape[1]):
        token = qkv[:, i], gate[:, i], write[:, i], rate[:, i]
        out, inputs, state = jaxkern.gated_delta_net_step(
            *token, *weights, inputs, state
        )
        outs.append(out)
    window = jnp.concatenate([inputs, rest[4][:, TAPS - 1 :]], axis=1)
    return jnp.stack(outs, axis=1), window, state, keys, corrections, g


def steps(rule: Callable, backend: str, tokens: list, left: list):
    """All results, and what the last calls leave."""
    outs = []
    with jaxkern.backend(backend):
        for _ in range(STEPS):
            for i, (qkv, gate, *rest) in enumerate(tokens):
                b, t = qkv.shape[:2]
                accepted = jnp.full(b, t // 2, jnp.int32)
                out, *after = rule(qkv, gate, *rest, *left[i], accepted)
                left[i], tokens[i] = tuple(after), (qkv, out, *rest)
                outs.append(out)
    return outs, left


def bytes_moved(b: int, t: int) -> float:
    """The state read and written; the tokens, the weights, and what is kept of each."""
    c = (2 * K + N) * H
    state = 4.0 * b * (N * H * H + (TAPS - 1 + t) * c)
    kept = 4.0 * b * t * N * (2 * H + 1)
    tokens = 2.0 * b * t * (c + 2 * N * H + 2 * N)
    return 2 * (state + kept) + tokens + 4.0 * c * TAPS


def programs_of(case: str) -> dict[str, Steps]:
    tokens, left = operands(*CASES[case])
    rules = {
        "jaxkern": (jaxkern.gated_delta_net_verify, "auto"),
        "single steps": (single_steps, "auto"),
        "XLA": (jaxkern.gated_delta_net_verify, "xla"),
    }
    return {
        who: Steps.of(functools.partial(steps, *rule), tokens, left)
        for who, rule in rules.items()
    }


def main(arguments):
    moved = {case: bytes_moved(*CASES[case]) for case in CASES}
    return compare(NAME, moved, programs_of, arguments)
