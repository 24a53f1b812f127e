"""Writes mlx_fused.npz: what MLX's fused functions compute (run with mlx[cpu])."""

from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np


def main() -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x, weight, bias = draw(3, 5, 16), draw(16), draw(16)
    heads, key, value = draw(2, 4, 6, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16)
    mask = rng.random((2, 1, 6, 9)) < 0.6
    mask[..., 0] = True  # each query sees a key
    given = dict(x=x, weight=weight, bias=bias, heads=heads, key=key, value=value)
    given["mask"] = mask
    a = {name: mx.array(array) for name, array in given.items()}
    x, q, k, v = a["x"], a["heads"], a["key"], a["value"]
    rope = {"base": 500.0, "scale": 1.0}
    sdpa = {"scale": 0.3}
    square = k[..., :6, :], v[..., :6, :]
    made = {
        "rms_norm": mx.fast.rms_norm(x, a["weight"], 1e-3),
        "layer_norm": mx.fast.layer_norm(x, a["weight"], a["bias"], 1e-3),
        "gelu": mlx.nn.gelu_approx(x),
        "softmax": mx.softmax(x, axis=-1),
        "rope": mx.fast.rope(q, 16, traditional=False, offset=7, **rope),
        "rope_part": mx.fast.rope(q, 8, traditional=False, offset=7, **rope),
        "rope_traditional": mx.fast.rope(q, 16, traditional=True, offset=7, **rope),
        "sdpa": mx.fast.scaled_dot_product_attention(q, k, v, mask=a["mask"], **sdpa),
        "sdpa_causal": mx.fast.scaled_dot_product_attention(
            q, *square, mask="causal", **sdpa
        ),
    }
    out = given | {f"{name}_y": np.array(y) for name, y in made.items()}
    np.savez_compressed(Path(__file__).parent / "mlx_fused.npz", **out)


if __name__ == "__main__":
    main()
