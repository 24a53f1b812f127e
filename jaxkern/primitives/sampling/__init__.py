"""Drawing tokens."""

from jaxkern.primitives.sampling.repetition_penalty import apply_repetition_penalty
from jaxkern.primitives.sampling.sample import sample
from jaxkern.primitives.sampling.softmax_sample import softmax_sample

__all__ = [
    "apply_repetition_penalty",
    "sample",
    "softmax_sample",
]
