"""Gated delta rules, scans and short convolutions."""

from jaxkern.primitives.delta_rule.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_step,
)
from jaxkern.primitives.delta_rule.compute_g_beta import (
    compute_g_beta,
    log_decay_from_positive,
)
from jaxkern.primitives.delta_rule.cumsum import cumsum
from jaxkern.primitives.delta_rule.gated_delta_net_inputs import (
    gated_delta_net_inputs,
)
from jaxkern.primitives.delta_rule.gated_delta_net_step import gated_delta_net_step
from jaxkern.primitives.delta_rule.gated_delta_net_verify import (
    gated_delta_net_verify,
)
from jaxkern.primitives.delta_rule.gated_delta_rule import gated_delta_rule
from jaxkern.primitives.delta_rule.gated_delta_step import gated_delta_step
from jaxkern.primitives.delta_rule.kimi_delta_attention import (
    kimi_delta_attention,
)
from jaxkern.primitives.delta_rule.kimi_delta_attention_step import (
    kimi_delta_attention_step,
)
from jaxkern.primitives.delta_rule.packed_sequences import segment_ids_from_cu_seqlens
from jaxkern.primitives.delta_rule.selective_scan import selective_scan
from jaxkern.primitives.delta_rule.solve_unit_lower import solve_unit_lower
from jaxkern.primitives.delta_rule.state_space_dual import state_space_dual
from jaxkern.primitives.delta_rule.unit_lower_inverse import unit_lower_inverse

__all__ = [
    "causal_conv1d",
    "causal_conv1d_step",
    "compute_g_beta",
    "cumsum",
    "gated_delta_net_inputs",
    "gated_delta_net_step",
    "gated_delta_net_verify",
    "gated_delta_rule",
    "gated_delta_step",
    "kimi_delta_attention",
    "kimi_delta_attention_step",
    "log_decay_from_positive",
    "segment_ids_from_cu_seqlens",
    "selective_scan",
    "solve_unit_lower",
    "state_space_dual",
    "unit_lower_inverse",
]
