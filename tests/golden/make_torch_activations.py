"""PyTorch's activations and their derivatives in float64, to torch_activations.npz.

Run with a Python that has torch (2.13.0, the CPU build, made the stored file):

    python tests/golden/make_torch_activations.py
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

CEILING, ALPHA = 1.5, 0.7  # the coefficients of clipped_relu and elu
FUNCTIONS = {
    "relu": F.relu,
    "clipped_relu": lambda z: F.hardtanh(z, 0.0, CEILING),
    "elu": lambda z: F.elu(z, ALPHA),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def main() -> None:
    corners = [-30.0, 0.0, CEILING, 30.0]
    z = np.concatenate([np.linspace(-6, 6, 41), corners])
    arrays = {"z": np.float32(z)}
    for name, f in FUNCTIONS.items():
        x = torch.tensor(np.float64(arrays["z"]), requires_grad=True)
        y = f(x)
        y.sum().backward()
        arrays[name], arrays[f"{name}_slope"] = y.detach().numpy(), x.grad.numpy()
    np.savez(Path(__file__).parent / "torch_activations.npz", **arrays)


if __name__ == "__main__":
    main()
