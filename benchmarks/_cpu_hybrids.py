"""Cases of `cpu_ops`: the recurrences of hybrid models, and experts."""

from collections.abc import Iterator

from benchmarks._cpu_cases import Case, normal


def delta_rule_cases() -> Iterator[Case]:
    """The heads of Qwen3-Next, and one device's share of them."""
    from jaxkern import gated_delta_rule, gated_delta_step

    rule = "gated_delta_rule"
    for b, k, n, h in ((1, 4, 8, 128), (1, 16, 32, 128), (8, 16, 32, 128)):
        q, v = normal(b, k, h, scale=h**-0.5), normal(b, n, h)
        g, beta = -abs(normal(b, n)), abs(normal(b, n)) / 4
        state = normal(b, n, h, h)
        flops, name = 7.0 * state.size, f"step of {b}, {n}/{k} heads of {h}"
        yield Case(rule, name, gated_delta_step, (q, q, v, g, beta, state), flops)
    for t, k, n, h in ((256, 4, 8, 128), (1024, 16, 32, 128)):
        q, v = normal(1, t, k, h, scale=h**-0.5), normal(1, t, n, h)
        g, beta = -abs(normal(1, t, n)), abs(normal(1, t, n)) / 4
        flops = 7.0 * t * n * h * h
        name = f"rule of {t} tokens, {n}/{k} heads of {h}"
        yield Case(rule, name, gated_delta_rule, (q, q, v, g, beta), flops)
    yield from kimi_cases()


def kimi_cases() -> Iterator[Case]:
    """The heads of Kimi-Linear."""
    from jaxkern import kimi_delta_attention, kimi_delta_attention_step

    rule, n, h = "kimi_delta_attention", 32, 128
    for t in (1, 64, 512):
        q, v = normal(1, t, n, h, scale=h**-0.5), normal(1, t, n, h)
        g, beta = -abs(normal(1, t, n, h)), abs(normal(1, t, n)) / 4
        operands, flops = (q, q, v, g, beta), 7.0 * t * n * h * h
        f, name = kimi_delta_attention, f"{t} tokens, {n} heads of {h}"
        if t == 1:
            f, operands = kimi_delta_attention_step, [y[:, 0] for y in operands]
        yield Case(rule, name, f, (*operands, normal(1, n, h, h)), flops)


def state_space_cases() -> Iterator[Case]:
    """The heads of Granite 4.0 H Tiny and Small: 64 rows of 128, in one group."""
    from jaxkern import state_space_dual

    h, size = 64, 128
    for n in (48, 128):
        for t in (1, 64, 512):
            x, step, a = normal(1, t, n, h), abs(normal(1, t, n)) / 4, -abs(normal(n))
            b, c = normal(1, t, 1, size), normal(1, t, 1, size, scale=size**-0.5)
            operands = x, step, a, b, c, normal(1, n, h, size)
            name, flops = f"{t} tokens, {n} heads", 5.0 * t * n * h * size
            op = "state_space_dual"
            yield Case(op, name, state_space_dual, operands, flops)


def expert_cases() -> Iterator[Case]:
    """k of e experts of width f for each token, all of them equally often."""
    import jax
    import jax.numpy as jnp

    from jaxkern import moe_ffn

    def drawn(*shape, dtype):
        return jax.random.normal(jax.random.key(0), shape, dtype) * shape[-1] ** -0.5

    for model, e, k, f, d, dtype in (
        ("Qwen3.6-35B-A3B", 256, 8, 512, 2048, "bfloat16"),
        ("Granite 4.0 H Tiny", 64, 6, 512, 1536, "bfloat16"),
        ("Granite 4.0 H Tiny", 64, 6, 512, 1536, "float32"),
    ):
        gate, down = drawn(e, f, d, dtype=dtype), drawn(e, d, f, dtype=dtype)
        for t in (1, 4, 32, 512):
            ids = jnp.arange(t * k, dtype=jnp.int32).reshape(t, k) % e
            x, weights = normal(t, d, dtype=dtype), jnp.ones((t, k), dtype) / k
            read = 3 * min(e, t * k) * gate[0].nbytes + x.nbytes
            name, flops = f"{model}, {t} tokens, {dtype}", 6.0 * t * k * f * d
            operands = x, ids, weights, gate, gate + 1, down
            yield Case("moe_ffn", name, moe_ffn, operands, flops, read, whole=False)
