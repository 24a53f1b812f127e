"""One token of Kimi delta attention, measured as gated_delta_step.py does."""

import jaxkern
from benchmarks.delta_rule.gated_delta_step import H, measure


def main(arguments):
    step = jaxkern.kimi_delta_attention_step
    return measure("kimi_delta_attention_step", step, (H,), arguments)
