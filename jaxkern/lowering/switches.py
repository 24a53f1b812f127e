"""Steps of a first start that are switched while they are measured."""

import os

STEPS = os.environ.get("JAXKERN_START", "MPZA").split(",")


def on(step: str) -> bool:
    return step in STEPS[0]


def num_pieces() -> int:
    return int(os.environ.get("JAXKERN_PIECES", "1"))
