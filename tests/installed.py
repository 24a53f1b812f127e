"""python tests/installed.py: an installed jaxkern runs an operator by its C++ kernel.

Run outside of a checkout, by tests/test_wheel.py and for each wheel by cibuildwheel.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    import jaxkern

    place = Path(jaxkern.__file__).parent
    assert place.parent != Path(__file__).parents[1], "this is the checkout"
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 37)), jnp.float32)
    with jaxkern.backend("cpp", strict=True):
        lowered = jax.jit(jaxkern.softmax).lower(x)
        y = lowered.compile()(x)
    assert "jaxkern_softmax" in lowered.as_text(), "no call of the library"
    np.testing.assert_allclose(y, jax.nn.softmax(x), rtol=1e-5)
    print(f"jaxkern of {place} runs its kernels on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
