"""linear_distillation: equals the divergence of the logits, in a block's memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkern import linear_distillation
from jaxkern.testing.checks import bf16, case, f32

SIZES = dict(
    x=f32(8, 3), weight=f32(7, 3), teacher_x=f32(8, 2), teacher_weight=f32(7, 2)
)
DIVERGENCES = ["forward_kl", "reverse_kl", "jensen_shannon"]
CASES = [
    case(name, divergence=name, block_size=3, temperature=1.5, ulps=16, **SIZES)
    for name in DIVERGENCES
] + [
    case(
        "bf16_one_block",
        full=True,
        x=bf16(2, 2, 4),
        weight=bf16(5, 4),
        teacher_x=bf16(2, 2, 4),
        teacher_weight=bf16(5, 4),
        ulps=16,
    ),
]


def draw(*shape, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


OPERANDS = draw(2, 5, 6), draw(11, 6), draw(2, 5, 4), draw(11, 4)


def of_logits(x, weight, teacher_x, teacher_weight, divergence, beta, temperature):
    """The formulas in whole logits."""
    log_q = jax.nn.log_softmax(x @ weight.T / temperature)
    log_p = jax.nn.log_softmax(teacher_x @ teacher_weight.T / temperature)
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if divergence == "forward_kl":
        return jnp.sum(p * (log_p - log_q), axis=-1)
    if divergence == "reverse_kl":
        return jnp.sum(q * (log_q - log_p), axis=-1)
    log_m = jnp.log(beta * p + (1 - beta) * q)
    from_p, from_q = (jnp.sum(r * (jnp.log(r) - log_m), axis=-1) for r in (p, q))
    return beta * from_p + (1 - beta) * from_q


@pytest.mark.parametrize("block_size", [1, 4, 11, None])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equals_the_divergence_of_the_logits_in_float64(divergence, block_size):
    options = dict(divergence=divergence, beta=0.3, temperature=1.7)
    cotangent = draw(2, 5, seed=1)
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) for a in OPERANDS]
        plain = functools.partial(of_logits, **options)
        expected, expected_pull = jax.vjp(plain, *wide)
        expected_gradients = expected_pull(cotangent.astype(jnp.float64))
    by_blocks = functools.partial(linear_distillation, block_size=block_size, **options)
    actual, pull = jax.vjp(by_blocks, *OPERANDS)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)
    for g, e in zip(pull(cotangent), expected_gradients, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_of_a_student_like_its_teacher_nothing_is_left(divergence):
    x, weight = OPERANDS[:2]

    def total(x, weight):
        each = linear_distillation(x, weight, *OPERANDS[:2], divergence=divergence)
        return each.sum(), each

    (_, each), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(x, weight)
    np.testing.assert_allclose(each, 0, atol=2e-6)
    for g in gradients:
        np.testing.assert_allclose(g, 0, atol=1e-5)


@pytest.mark.parametrize("wrt", [(0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_logits_are_never_in_memory(divergence, wrt):
    tokens, v, d, block_size = 512, 8192, 8, 128
    operands = draw(tokens, d), draw(v, d), draw(tokens, d, seed=1), draw(v, d, seed=1)

    def loss(*operands):
        return linear_distillation(
            *operands, divergence=divergence, block_size=block_size
        ).mean()

    compiled = jax.jit(jax.value_and_grad(loss, wrt)).lower(*operands).compile()
    whole = tokens * v * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 6


def test_no_work_for_the_teacher_unless_asked():
    def loss(*operands):
        return linear_distillation(*operands, block_size=4).mean()

    products = [
        str(jax.make_jaxpr(jax.jit(jax.grad(loss, wrt)))(*OPERANDS))
        for wrt in ((0, 1), (0, 1, 2, 3))
    ]
    assert "wanted=(True, True, False, False)" in products[0]
    assert "wanted=(True, True, True, True)" in products[1]


def test_gradients_of_cut_tokens_on_an_explicit_mesh():
    operands = draw(8, 6), draw(11, 6), draw(8, 4), draw(11, 4)
    mesh = jax.make_mesh(
        (4,), ("m",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )

    def grads(*operands):
        def loss(*operands):
            return linear_distillation(
                *operands, divergence="jensen_shannon", block_size=4
            ).mean()

        return jax.jit(jax.grad(loss, (0, 1)))(*operands)

    expected = grads(*operands)
    with jax.set_mesh(mesh):
        cut = [
            jax.device_put(a, P("m") if i % 2 == 0 else P())
            for i, a in enumerate(operands)
        ]
        actual = grads(*cut)
    for g, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)


def test_every_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"`divergence` must be one of forward_kl"):
        linear_distillation(*OPERANDS, divergence="kl")
    with pytest.raises(ValueError, match=r"`beta` must lie within \(0, 1\), got 1"):
        linear_distillation(*OPERANDS, beta=1.0)
    with pytest.raises(ValueError, match=r"`temperature` must be positive"):
        linear_distillation(*OPERANDS, temperature=0.0)
    with pytest.raises(ValueError, match=r"`block_size` must be at least 1, got 0"):
        linear_distillation(*OPERANDS, block_size=0)
    with pytest.raises(TypeError, match=r"dim `v` is 11 in `weight` but 9 in"):
        linear_distillation(*OPERANDS[:3], OPERANDS[3][:9])
