"""What type checkers see of the public names: `make lint` reads it, a test runs it.

Each call has the type that its annotation promises, and what would be an error at run
time is one before: an ignored line that is none is an error itself.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from typing import assert_type

import jax
import jax.numpy as jnp

import jaxkern as jk
from jaxkern.lowering.explain import Explanation
from jaxkern.train import AdamW, TrainStep, train_step


def program(x: jax.Array) -> None:
    """x: `[4, 8]` of float32."""
    assert_type(jk.rms_norm(x), jax.Array)
    assert_type(jk.add_rms_norm(x, x), tuple[jax.Array, jax.Array])
    assert_type(jk.top_k(x, 2), tuple[jax.Array, jax.Array])
    assert_type(jk.quantize_gguf(jnp.ones((4, 32)), "Q8_0"), jk.GGUFTensor)
    assert_type(jk.explain(jk.rms_norm, x), Explanation)
    tokens = x.reshape(1, 2, 2, 8)
    empty = jk.empty_kv_cache(1, 2, 2, 8, dtype=jnp.float32)
    assert_type(empty, jk.KVCache)
    y, cache = jk.cached_attention(tokens, tokens, tokens, empty)
    assert_type(y, jax.Array)
    assert_type(cache, jk.KVCache | jk.PagedKVCache)
    same = tokens, tokens, tokens
    dropout, cap = jk.Dropout(0.1, jax.random.key(0)), jk.SoftcapAfterBias(2.0)
    out = jk.attention(*same, dropout=dropout, softcap=cap)
    assert_type(out, jax.Array | tuple[jax.Array, jax.Array])
    tables, at = jk.rope_cos_sin(jnp.arange(2), 8), jnp.zeros(1, int)
    into, how = (tokens, tokens, at), jk.NormRope(pairing="interleaved")
    written = jk.qk_norm_rope_cache(*same, (None, x[0]), tables, *into, norm_rope=how)
    assert_type(written, tuple[jax.Array, jax.Array, jax.Array])
    assert_type(jk.train.AdamW(0.1), AdamW)
    assert_type(train_step(lambda w, batch: w.sum(), AdamW(0.1)), TrainStep)


def mistakes(x: jax.Array) -> None:
    jk.rms_norm(x, epsilon=1e-6)  # type: ignore[call-arg]
    jk.softmax(x, scale="1")  # type: ignore[arg-type]
    jk.attention(x, x, x, dropout=0.1)  # type: ignore[arg-type]
    jk.NormRope(pairing="half")  # type: ignore[arg-type]
    jk.rms_nrom(x)  # type: ignore[attr-defined]
