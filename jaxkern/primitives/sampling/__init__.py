"""Drawing tokens."""

from jaxkern.primitives.sampling.cut_logits import cut_logits
from jaxkern.primitives.sampling.frequency_penalty import apply_frequency_penalty
from jaxkern.primitives.sampling.repetition_penalty import apply_repetition_penalty
from jaxkern.primitives.sampling.sample import sample
from jaxkern.primitives.sampling.softmax_sample import softmax_sample

__all__ = [
    "apply_frequency_penalty",
    "apply_repetition_penalty",
    "cut_logits",
    "sample",
    "softmax_sample",
]
