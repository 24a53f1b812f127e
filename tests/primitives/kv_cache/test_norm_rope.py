"""NormRope, and the pairs of weights and tables beside it: what is refused, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import NormRope, qk_norm_rope_cache

X, CACHE = jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 3, 2, 4))
TABLE, WEIGHT = jnp.ones((1, 1, 2)), jnp.ones(4)
NONE, TABLES = (None, None), (TABLE, TABLE)


def write(norm_weights, tables, **options):
    new = X, X, X, norm_weights, tables
    return qk_norm_rope_cache(*new, CACHE, CACHE, 0, **options)


@pytest.mark.parametrize(
    ("weights", "tables", "message"),
    [
        (
            None,
            TABLES,
            r"`norm_weights` must be the pair \(query_weight, key_weight\), ",
        ),
        (WEIGHT, TABLES, r"`norm_weights` must be .*, got ArrayImpl"),
        ((WEIGHT,), TABLES, r"`norm_weights` must be .*, got tuple of 1"),
        (NONE, TABLE, r"`tables` must be the pair \(cos, sin\), got ArrayImpl"),
        (NONE, (TABLE, None), r"`sin` is required, got None"),
        (NONE, ([1.0], TABLE), r"`cos` must be an array, got list"),
        ((WEIGHT, "text"), TABLES, r"`key_weight` must be an array, got str"),
        (
            (jnp.ones(4, int), None),
            TABLES,
            r"`query_weight` must .* kind Float, got int",
        ),
        ((jnp.ones(3), None), TABLES, r"dim `h` is 4 in `query` but 3 in `query_wei"),
    ],
    ids=str,
)
def test_what_is_no_pair_of_arrays_is_named(weights, tables, message):
    with pytest.raises(TypeError, match=f"^qk_norm_rope_cache: {message}"):
        write(weights, tables)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(eps=-1e-6), "`eps` must be finite and not negative, got -1e-06"),
        (dict(eps=float("nan")), "`eps` must be finite and not negative, got nan"),
        (
            dict(value_eps=np.inf),
            "`value_eps` must be finite and not negative, got inf",
        ),
        (dict(eps="1"), "`eps` must be float, got '1'"),
        (dict(pair_offset=1.5), "`pair_offset` must be int, got 1.5"),
        (dict(pairing=["neox"]), "`pairing` must be str, got list"),
    ],
    ids=str,
)
def test_an_option_is_checked_where_it_is_given(wrong, message):
    with pytest.raises((TypeError, ValueError), match=f"^NormRope: {message}"):
        NormRope(**wrong)


def test_numbers_in_arrays_are_numbers_and_traced_ones_are_refused():
    how = NormRope(np.array(1e-5), pair_offset=np.int64(2), at_end=np.True_)
    assert how == NormRope(1e-5, pair_offset=2, at_end=True)
    assert hash(how) == hash(NormRope(1e-5, pair_offset=2, at_end=True))
    with pytest.raises(TypeError, match=r"^NormRope: `eps` must be a static float"):
        jax.jit(lambda eps: NormRope(eps))(1e-6)


@pytest.mark.parametrize(
    ("wrong", "got"), [(None, "NoneType"), (1e-6, "float 1e-06"), ({}, "dict")], ids=str
)
def test_what_is_no_record_is_refused(wrong, got):
    message = f"^qk_norm_rope_cache: `norm_rope` must be NormRope, got {got}"
    with pytest.raises(TypeError, match=message):
        write(NONE, TABLES, norm_rope=wrong)


def test_an_unknown_pairing_is_named_by_the_operator():
    how = NormRope(pairing="half")  # pyright: ignore
    with pytest.raises(ValueError, match=r"^qk_norm_rope_cache: pairing 'half' is not"):
        write(NONE, TABLES, norm_rope=how)


def test_the_options_of_before_are_no_arguments():
    for name in ("eps", "value_eps", "offset", "pairing", "pair_offset", "at_end"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument .{name}"):
            write(NONE, TABLES, **{name: None})
