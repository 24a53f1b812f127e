"""Training: one compiled step with donated state around any loss and optimiser.

    step = train_step(next_token_loss(config), AdamW(3e-4), accumulate=4, clip_norm=1.0)
    state = step.init(weights)
    for batch in batches:
        state, metrics = step(state, batch)

Several devices are JAX's own: give `init` weights that are cut, and batches that are;
`whole_weights` gathers them for the loss.
docs/training.md has precision, rematerialisation, meshes and checkpoints.
"""

from jaxkern.train.adamw import AdamW
from jaxkern.train.next_token_loss import next_token_loss
from jaxkern.train.readable import readable
from jaxkern.train.train_step import Metrics, TrainState, TrainStep, train_step
from jaxkern.train.whole_weights import whole_weights

__all__ = [
    "AdamW",
    "Metrics",
    "TrainState",
    "TrainStep",
    "next_token_loss",
    "readable",
    "train_step",
    "whole_weights",
]
