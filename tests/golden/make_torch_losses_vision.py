"""What PyTorch on a CPU says of losses, convolutions, pooling and resizing, in float64.

    python -m tests.golden.make_torch_losses_vision

needs PyTorch (the committed file is from 2.13.0, Python 3.11). Its answers are stored
beside this script as `torch_losses_vision.npz`: for each name in CALLS the operands,
the result `y`, its cotangent `dy` and the gradients of the operands.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

LABELS = torch.tensor([3, 0, -100, 6, 2])


def softcapped_loss(logits):
    z = 30 * torch.tanh(logits / 30)
    nll = F.cross_entropy(z, LABELS, label_smoothing=0.1, reduction="none")
    square = torch.logsumexp(z, -1) ** 2
    return nll + 1e-2 * torch.where(LABELS >= 0, square, 0)


CALLS = {  # name: shapes of the float operands, function of them
    "cross_entropy": (
        [(5, 7)],
        lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    ),
    "cross_entropy_smoothed": (
        [(5, 7)],
        lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.2, reduction="none"),
    ),
    "cross_entropy_mean": ([(5, 7)], lambda x: F.cross_entropy(x, LABELS)),
    "cross_entropy_capped": ([(5, 7)], softcapped_loss),
    "linear_cross_entropy": (
        [(5, 4), (7, 4)],
        lambda x, w: softcapped_loss(x @ w.T),
    ),
    "conv2d": (
        [(2, 3, 7, 6), (4, 3, 3, 2), (4,)],
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 0)),
    ),
    "conv2d_groups": (
        [(2, 4, 6, 7), (6, 2, 2, 3), (6,)],
        lambda x, w, b: F.conv2d(x, w, b, padding=2, dilation=(1, 2), groups=2),
    ),
    "conv2d_same": (
        [(1, 2, 5, 5), (3, 2, 5, 3)],
        lambda x, w: F.conv2d(x, w, padding="same"),
    ),
    "conv_transpose2d": (
        [(2, 3, 4, 5), (3, 2, 3, 2), (2,)],
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(2, 3), padding=(1, 0)),
    ),
    "conv_transpose2d_groups": (
        [(1, 4, 3, 4), (4, 3, 3, 2), (6,)],
        lambda x, w, b: F.conv_transpose2d(
            x, w, b, 2, padding=1, output_padding=(1, 0), groups=2, dilation=(2, 1)
        ),
    ),
    "max_pool2d": (
        [(2, 3, 7, 6)],
        lambda x: F.max_pool2d(x, (3, 2), stride=(2, 1), padding=(1, 0)),
    ),
    "avg_pool2d": (
        [(2, 3, 7, 6)],
        lambda x: F.avg_pool2d(x, (3, 2), stride=(2, 1), padding=(1, 1)),
    ),
    "avg_pool2d_exclude_pad": (
        [(2, 3, 7, 6)],
        lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False),
    ),
    "resize_down": (
        [(1, 2, 9, 7)],
        lambda x: F.interpolate(x, (4, 5), mode="bilinear", antialias=True),
    ),
    "resize_up": (
        [(1, 2, 4, 5)],
        lambda x: F.interpolate(x, (7, 11), mode="bilinear", antialias=True),
    ),
    "resize_nearest": ([(1, 2, 3, 4)], lambda x: F.interpolate(x, scale_factor=2)),
    "unfold": ([(1, 3, 4, 6)], lambda x: F.unfold(x, (2, 2), stride=2)),
}


def main() -> None:
    rng = np.random.default_rng(0)
    arrays = {}

    def draw(shape):  # exact in float32, with ties, and compresses well
        return torch.tensor(rng.integers(-12, 13, shape) / 4)

    for name, (shapes, f) in CALLS.items():
        operands = [draw(s) for s in shapes]
        for x in operands:
            x.requires_grad_()
        y = f(*operands)
        dy = draw(tuple(y.shape))
        gradients = torch.autograd.grad(y, operands, dy)
        arrays |= {f"{name}/y": y, f"{name}/dy": dy}
        arrays |= {f"{name}/x{i}": x for i, x in enumerate(operands)}
        arrays |= {f"{name}/dx{i}": g for i, g in enumerate(gradients)}
    np.savez_compressed(
        Path(__file__).with_name("torch_losses_vision.npz"),
        **{name: x.detach().numpy().astype(np.float32) for name, x in arrays.items()},
    )


if __name__ == "__main__":
    main()
