"""What holds for every public function, and for none more than for another."""

import dataclasses
import inspect
import pickle
import re
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.testing.check_op import smallest_case
from jaxkern.testing.checks import operands_of, options_of
from tests.cases import cases_of
from tests.test_every_op import OPS

FUNCTIONS = [
    getattr(jaxkern, name)
    for name in jaxkern.__all__
    if inspect.isfunction(getattr(jaxkern, name))
]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_package_names_the_function_of_its_module(f):
    """One object, checked at its definition.

    The other tests of this file call what the package names, and could not see that a
    function imported from its module took what the package's refused.
    """
    module = sys.modules[inspect.unwrap(f).__globals__["__name__"]]
    assert getattr(module, f.__name__) is f
    assert f.__module__ == "jaxkern", "@check_arguments is missing"


def sections(f):
    """The sections of its docstring by name."""
    parts = re.split(
        r"^(Args|Attributes|Returns|Raises):", inspect.getdoc(f) or "", flags=re.M
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", jaxkern.__all__)
def test_a_docstring_names_every_argument_result_and_error(name):
    f = getattr(jaxkern, name)
    found = sections(f)
    if inspect.isfunction(f):
        assert "Returns" in found and "Raises" in found
        named, listed = inspect.signature(f).parameters, found.get("Args", "")
    else:
        named, listed = dataclasses.fields(f), found.get("Attributes", "")
        named = [field.name for field in named]
    missing = [n for n in named if not re.search(rf"\b{n}\b", listed)]
    assert not missing, f"{name}: {missing}"


def takes_an_array(f):
    """Its first parameter is an array and nothing else."""
    first = str(next(iter(typing.get_type_hints(f).values())))
    return "jaxtyping" in first and not any(k in first for k in ("tuple", "quant"))


@pytest.mark.parametrize("wrong", [[[0.0]], "text"], ids=str)
def test_what_is_no_array_is_refused_by_name(wrong):
    functions = list(filter(takes_an_array, FUNCTIONS))
    assert len(functions) > 100
    for f in functions:
        parameters = inspect.signature(f).parameters.values()
        required = [q for q in parameters if q.default is q.empty]
        arrays = [wrong for q in required if q.kind is q.POSITIONAL_OR_KEYWORD]
        options = {q.name: 1 for q in required if q.kind is q.KEYWORD_ONLY}
        with pytest.raises(TypeError, match=f"^{f.__name__}: `"):
            f(*arrays, **options)


def test_a_wrong_dtype_is_refused_before_it_is_converted():
    pages, new = jnp.zeros((2, 4, 1, 8)), jnp.zeros((1, 1, 1, 8), jnp.int32)
    with pytest.raises(TypeError, match=r"^update_paged_kv_cache: `new`.* Float"):
        jaxkern.update_paged_kv_cache(pages, new, jnp.zeros((1, 1), jnp.int32))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": "2"}, "`window` must be a static int or .*, got '2'"),
        ({"scale": "1"}, "`scale` must be an array, got str"),
        (
            {"softcap": "1"},
            r"`softcap` must be SoftcapAfterBias\(cap\) or float, got '1'",
        ),
        ({"dropout": 0.1}, r"`dropout` must be Dropout\(rate, key\), got float 0\.1\."),
        ({"sinks": [0.0]}, "`sinks` must be an array, got list"),
        ({"q_offset": 0.5}, "`q_offset` must have a dtype of kind Int, got float32"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(wrong, message):
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(TypeError, match=f"^attention: {message}"):
        jaxkern.attention(x, x, x, causal=True, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"score": ["sigmoid"]}, "`score` must be str, got list"),
        ({"score": np.ones(2)}, "`score` must be str, got ndarray"),
        (
            {"normalize": np.ones(2)},
            r"`normalize` must be bool, got an array of .*\(2,",
        ),
        ({"num_groups": 1.5}, "`num_groups` must be int, got 1.5"),
        (
            {"scaling_factor": np.ones(1)},
            "`scaling_factor` must be float, got an array",
        ),
    ],
    ids=str,
)
def test_an_option_of_another_kind_is_named(wrong, message):
    """Names and switches were left to the function, which spoke of hashes and truth."""
    with pytest.raises(TypeError, match=f"^route: {message}"):
        jaxkern.route(jnp.ones((2, 4)), 2, **wrong)


@pytest.mark.parametrize("wrong", ["text", [1.0], None], ids=str)
def test_weights_that_are_neither_an_array_nor_quantised_are_named(wrong):
    message = "^grouped_matmul: `w` must be array or QuantizedTensor, got"
    with pytest.raises(TypeError, match=message):
        jaxkern.grouped_matmul(jnp.ones((2, 4)), wrong, jnp.array([2]))


def test_a_number_that_is_held_as_an_array_is_the_number():
    x = jnp.arange(8.0).reshape(2, 4)
    weights, ids = jaxkern.route(x, jnp.asarray(2), scaling_factor=np.array(2.5))
    for found, e in zip(
        (weights, ids), jaxkern.route(x, 2, scaling_factor=2.5), strict=True
    ):
        np.testing.assert_array_equal(found, e)


def test_a_negative_or_no_eps_is_refused_by_every_function_that_has_one():
    functions = [f for f in FUNCTIONS if "eps" in inspect.signature(f).parameters]
    assert len(functions) > 20
    for f in functions:
        for wrong in (-1e-6, float("nan"), float("inf"), np.float32(-1)):
            message = f"^{f.__name__}: `eps` must be finite and not negative, got"
            with pytest.raises(ValueError, match=message):
                f(eps=wrong)


@pytest.mark.parametrize(
    "wrong", [2**40, -(2**31) - 1, np.int64(2**31), np.array([2**40])]
)
def test_an_integer_that_would_wrap_is_refused(wrong):
    x = jnp.ones((1, 2, 1, 4))
    message = "`{}` must fit in int32, got " + str(np.max(wrong))
    with pytest.raises(ValueError, match="^attention: " + message.format("q_offset")):
        jaxkern.attention(x, x, x, causal=True, q_offset=wrong)
    with pytest.raises(
        ValueError, match="^update_kv_cache: " + message.format("positions")
    ):
        jaxkern.update_kv_cache(x, x, wrong)
    if np.ndim(wrong) == 0:
        with pytest.raises(ValueError, match="^sample: " + message.format("top_k")):
            jaxkern.sample(x, jax.random.key(0), top_k=wrong)
        with pytest.raises(ValueError, match=message.format("ignore_index")):
            jaxkern.cross_entropy(x, jnp.zeros((1, 2, 1), int), ignore_index=wrong)


def test_the_largest_int32_is_taken():
    x = jnp.ones((1, 2, 1, 4))
    y = jaxkern.attention(x, x, x, causal=True, q_offset=2**31 - 1)
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (None, "NoneType"),
        (0, "int"),
        (np.zeros(3, np.uint32), r"uint32\[3\]"),
        (np.zeros(2, np.float32), r"float32\[2\]"),
        (jax.random.split(jax.random.key(0)), r"key<fry>\[2\]"),
    ],
    ids=str,
)
def test_what_is_no_key_is_refused(wrong, got):
    with pytest.raises(TypeError, match=f"^sample: `key` must be one PRNG key.* {got}"):
        jaxkern.sample(jnp.ones((2, 5)), wrong)


@pytest.mark.parametrize(
    "make",
    [jax.random.key, jax.random.PRNGKey, lambda n: jax.random.key(n, impl="rbg")],
)
def test_a_key_of_each_kind_is_taken(make):
    assert jaxkern.sample(jnp.ones((2, 5)), make(0)).shape == (2,)


@pytest.mark.parametrize("shape", [(2,), (4, 1), (0,)])
def test_positions_of_another_number_of_sequences_are_refused(shape):
    cache, positions = jnp.ones((4, 2, 1, 8)), jnp.zeros(shape, int)
    turned = jnp.ones((4, 2, 4))
    message = r"`positions` must be a number or one per sequence, \[4\], got shape"
    with pytest.raises(TypeError, match=f"^update_kv_cache: {message}"):
        jaxkern.update_kv_cache(cache, cache, positions)
    with pytest.raises(TypeError, match=f"^qk_norm_rope_cache: {message}"):
        jaxkern.qk_norm_rope_cache(
            *(cache, cache, cache, (None, None), (turned, turned)),
            *(cache, cache, positions),
        )


@pytest.mark.parametrize(
    "name", ["softmax", "l2_norm", "cumsum", "fwht", "argsort", "argmax"]
)
def test_an_axis_outside_is_named(name):
    with pytest.raises(
        ValueError, match=f"^{name}: `axis` must name one of the 1 dims"
    ):
        getattr(jaxkern, name)(jnp.ones(4), axis=1)


X = jnp.arange(1200.0).reshape(1, 300, 1, 4) / 1200
Q = X[:, :40]
DYNAMIC = jaxkern.DynamicScaling(2.0, 8)


@pytest.mark.parametrize(
    ("number", "f"),
    [
        (100, lambda i: jaxkern.update_kv_cache(X, Q, i)),
        (100, lambda i: jaxkern.update_kv_cache(X, Q, i, ring=True)),
        (100, lambda i: jaxkern.attention(Q, X, X, causal=True, q_offset=i)),
        (100, lambda i: jaxkern.attention(Q, X, X, kv_lengths=i)),
        (100, lambda i: jaxkern.segment_ids_from_cu_seqlens(i, 300)),
        (100, lambda i: jaxkern.page_slots(i[None], i, 9, 70)),
        (100, lambda i: jaxkern.gather_pages(X.reshape(300, 1, 1, 4), i[None])),
        (255, lambda i: jaxkern.rope_cos_sin(i, 8, scaling=DYNAMIC)[0]),
    ],
)
def test_narrow_integers_do_not_wrap(number, f):
    expected = f(jnp.full(1, number, jnp.int32))
    for dtype in (np.int8, np.uint8) if number < 128 else (np.uint8, np.uint32):
        np.testing.assert_array_equal(f(np.full(1, number, dtype)), expected)


@pytest.mark.parametrize("window", [2**31, 2.5])
def test_a_window_that_counts_no_keys_is_refused(window):
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match=r"^attention: window is .* below 2\*\*31"):
        jaxkern.attention(x, x, x, causal=True, window=window)


@pytest.mark.parametrize("name", ["window", "softcap", "causal"])
def test_a_traced_option_is_named(name):
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(TypeError, match=f"^attention: `{name}` must be a static"):
        jax.jit(lambda value: jaxkern.attention(x, x, x, **{name: value}))(1)


def test_a_container_of_another_kind_is_named():
    x = jnp.ones((1, 2, 1, 4))
    message = "^cached_attention: `cache` must be KVCache or PagedKVCache, got dict"
    with pytest.raises(TypeError, match=message):
        jaxkern.cached_attention(x, x, x, {"keys": x})  # pyright: ignore


def test_numbers_of_numpy_are_numbers():
    x = jnp.arange(8.0).reshape(1, 2, 1, 4)
    plain = jaxkern.attention(x, x, x, causal=True, window=1, scale=0.5)
    options = {"causal": np.True_, "window": np.int64(1), "scale": np.float64(0.5)}
    np.testing.assert_array_equal(jaxkern.attention(x, x, x, **options), plain)


def test_a_public_function_pickles():
    assert pickle.loads(pickle.dumps(jaxkern.gelu)) is jaxkern.gelu


def test_references_promote_whatever_the_user_forbids_himself():
    names = ("rms_norm", "attention", "rope_from", "cross_entropy", "dequantize_affine")
    cases = {p: smallest_case(p, cases_of(p)) for p in OPS if p.name in names}

    def every_op(operands):
        return [
            p(*operands[p.name], **options_of(p, case)) for p, case in cases.items()
        ]

    operands = {p.name: operands_of(p, case) for p, case in cases.items()}
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones(8)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.make_jaxpr(every_op)(operands)
        jax.jit(jax.grad(lambda x: jaxkern.rms_norm(x, w).sum())).lower(x)


def test_type_checkers_are_told_that_the_package_is_typed():
    """Annotations were there, but without this file no tool of a user reads them."""
    assert (Path(jaxkern.__file__).parent / "py.typed").exists()
    decorated = typing.get_type_hints(check_arguments)
    assert decorated["fn"] == decorated["return"], "a checked function keeps its type"
