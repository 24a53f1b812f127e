"""Writes mlx_quantized_matmul.npz: MLX's products with codes of every width and group
(run with mlx[cpu])."""

from pathlib import Path

import mlx.core as mx
import numpy as np

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
BATCH, ROWS, WIDTH = 3, 3, 128


def main() -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        """Numbers that every dtype holds."""
        return (rng.integers(-99, 100, shape) / 64).astype(np.float16)

    x = draw(BATCH, 2, WIDTH)
    out = {"x": x}
    for bits, group in [(b, g) for b in BITS for g in GROUPS]:
        # one matrix; or of one width and group a batch, as x is
        lead = (BATCH,) if (bits, group) == (5, 32) else ()
        words = rng.integers(0, 2**32, (*lead, ROWS, WIDTH * bits // 32), np.uint32)
        scales, biases = draw(2, *lead, ROWS, WIDTH // group)
        key, options = f"{bits}_{group}", {"group_size": group, "bits": bits}
        out |= {f"{key}_codes": words, f"{key}_scales": scales, f"{key}_biases": biases}
        for dtype in FLOATS if group == 32 else FLOATS[:1]:
            rows = x if lead else x[0]
            floats = [mx.array(a).astype(dtype) for a in (rows, scales, biases)]
            weights = mx.array(words), *floats[1:]
            y = mx.quantized_matmul(floats[0], *weights, transpose=True, **options)
            w = mx.dequantize(*weights, **options)[..., :1, :]
            name = f"{key}_{str(dtype).split('.')[-1]}"
            for kind, a in (("y", y), ("w", w)):
                out[f"{name}_{kind}"] = np.array(a.astype(mx.float32))
    np.savez_compressed(Path(__file__).parent / "mlx_quantized_matmul.npz", **out)


if __name__ == "__main__":
    main()
