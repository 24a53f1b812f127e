"""The gated delta rule of one token on a CPU, by gated_delta_rule.h."""

from jaxkern.cpu.delta_rule.gated_delta_rule import gated_delta_rule
from jaxkern.cpu.delta_rule.gated_delta_rule import unsupported as unsupported


def gated_delta_step(query, key, value, g, beta, state, *, scale: float):
    query, key, value, g, beta = (x[:, None] for x in (query, key, value, g, beta))
    out, state = gated_delta_rule(
        query, key, value, g, beta, state, scale=scale, chunk_size=1
    )
    return out[:, 0], state
