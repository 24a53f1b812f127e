"""Activations and softmax."""

from jaxkern.primitives.activation.bias_activation import bias_activation
from jaxkern.primitives.activation.clipped_relu import clipped_relu
from jaxkern.primitives.activation.geglu import geglu
from jaxkern.primitives.activation.gelu import gelu
from jaxkern.primitives.activation.glu import glu
from jaxkern.primitives.activation.sigmoid_gate import sigmoid_gate
from jaxkern.primitives.activation.softcap import softcap
from jaxkern.primitives.activation.softmax import softmax
from jaxkern.primitives.activation.swiglu import swiglu

__all__ = [
    "bias_activation",
    "clipped_relu",
    "geglu",
    "gelu",
    "glu",
    "sigmoid_gate",
    "softcap",
    "softmax",
    "swiglu",
]
