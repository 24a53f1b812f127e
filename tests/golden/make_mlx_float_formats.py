"""Writes mlx_float_formats.npz: what mlx quantises and decodes (run with mlx[cpu])."""

from pathlib import Path

import mlx.core as mx
import numpy as np

ROWS, WIDTH = 8, 64


def weights() -> np.ndarray:
    """Ordinary groups, then zero, constant, one-sided, tiny, huge and rising ones."""
    w = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    w[1, :32], w[1, 32:] = 0, -0.75
    w[2] = np.abs(w[2])
    w[3, :32] *= 1e-9
    w[3, 32:] *= 1e4
    w[4] = np.linspace(-6, 6, WIDTH)
    w[5] = np.arange(WIDTH) % 16 / 4 * np.where(np.arange(WIDTH) % 2, 1, -1)  # ties
    w[6] = np.exp2(np.arange(WIDTH) % 32 - 16.0)
    w[7, ::3] = -0.0
    return w


def main() -> None:
    w = weights()
    out = {"w": w}
    amax = mx.array(np.abs(w).max())
    for mode in ("nvfp4", "mxfp4", "mxfp8"):
        for name, kwargs in [("", {}), ("_global", {"global_scale": amax})]:
            if name and mode != "nvfp4":
                continue
            codes, scales = mx.quantize(mx.array(w), mode=mode, **kwargs)
            values = mx.dequantize(codes, scales, mode=mode, dtype=mx.float32, **kwargs)
            out[f"{mode}{name}_codes"] = np.array(codes).view(np.uint8)
            out[f"{mode}{name}_scales"] = np.array(scales)
            out[f"{mode}{name}_values"] = np.array(values)
    np.savez_compressed(Path(__file__).parent / "mlx_float_formats.npz", **out)


if __name__ == "__main__":
    main()
