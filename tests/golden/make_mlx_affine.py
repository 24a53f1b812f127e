"""Writes mlx_affine.npz: what mlx quantises, packs, multiplies (run with mlx[cpu])."""

from pathlib import Path

import mlx.core as mx
import numpy as np

ROWS, WIDTH = 6, 128
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def weights() -> np.ndarray:
    """Ordinary groups, then zero, constant, one-sided, tiny, huge and rising ones."""
    w = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    w[1, :64], w[1, 64:] = 0, -0.75
    w[2] = np.abs(w[2])
    w[3, :64] *= 1e-9
    w[3, 64:] *= 1e4
    w[4] = np.linspace(-1, 1, WIDTH)  # many ties
    return w


def bits_of(a: mx.array) -> np.ndarray:
    """An array NumPy can hold: bfloat16 as its 16 bits."""
    return np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)


def main() -> None:
    w = weights()
    x = np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float32)
    out = {"w": w, "x": x}
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        name = str(dtype).split(".")[-1]
        for bits in BITS:
            for group in GROUPS if bits == 4 and dtype == mx.float32 else (64,):
                args = {"group_size": group, "bits": bits}
                q, s, b = mx.quantize(mx.array(w).astype(dtype), **args)
                key = f"{name}_{bits}_{group}"
                out[f"{key}_codes"], out[f"{key}_scales"] = np.array(q), bits_of(s)
                out[f"{key}_biases"] = bits_of(b)
                decoded = mx.dequantize(q, s, b, **args)
                y = mx.quantized_matmul(mx.array(x).astype(dtype), q, s, b, **args)
                if bits in (3, 4):
                    out[f"{key}_decoded"], out[f"{key}_y"] = (
                        bits_of(decoded),
                        bits_of(y),
                    )
    np.savez_compressed(Path(__file__).parent / "mlx_affine.npz", **out)


if __name__ == "__main__":
    main()
