"""Models whose files hold codebook and ternary blocks, which the C++ kernels refuse.

The other models of the tests have rows of 64 weights, so no block of 256 fits in them.
"""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.models.llama import empty_cache, hidden_states, logits
from jaxkern.models.loader import load_file
from jaxkern.primitives.quant.block_formats import FORMATS
from tests.golden.float64_llama import Float64Llama
from tests.models import tiny_gguf

D_MODEL = 256
# a format for each of the matrices that read the model dim, and where its scale is
REPLACED = {
    "blk.0.attn_q.weight": ("TQ1_0", 52),
    "blk.0.attn_k.weight": ("TQ2_0", 64),
    "blk.0.ffn_gate.weight": ("IQ2_S", 0),
    "blk.0.ffn_up.weight": ("IQ3_XXS", 0),
    "blk.1.attn_q.weight": ("IQ2_XXS", 0),
    "blk.1.ffn_up.weight": ("IQ1_S", 0),
    "token_embd.weight": ("IQ3_S", 0),
}


def blocks_of(qtype, scale_at, shape):
    """Random codes of weights below a half."""
    form = FORMATS[qtype]
    rng = np.random.default_rng(sum(qtype.encode()))
    size = (shape[0], shape[1] // form.elements, form.bytes)
    blocks = rng.integers(0, 256, size, dtype=np.uint8)
    small = np.float16(0.02 if qtype.startswith("TQ") else 0.0005)
    blocks[..., scale_at : scale_at + 2] = small.reshape(1).view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small_formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "D_MODEL", D_MODEL)
        patch.setitem(tiny_gguf.HEAD_DIM, "llama", D_MODEL // tiny_gguf.HEADS)
        source = tiny_gguf.write_tiny_gguf(folder / "source.gguf", "llama")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for t in reader.tensors:
        data, kind = t.data, t.tensor_type
        if t.name in REPLACED:
            qtype, scale_at = REPLACED[t.name]
            kind = gguf.GGMLQuantizationType[qtype]
            data = blocks_of(qtype, scale_at, t.shape[::-1])
        writer.add_tensor(t.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


@pytest.mark.parametrize("policy", ["f32", "packed"])
def test_a_model_of_small_formats_against_float64(path, policy):
    file = read_gguf(path)
    assert {file.tensors[n].qtype for n in REPLACED} == {
        q for q, _ in REPLACED.values()
    }
    config, weights = load_file(file, policy)
    tokens = np.random.default_rng(7).integers(0, tiny_gguf.VOCABULARY, 12)
    truth = Float64Llama(path).forward(tokens)
    assert np.std(truth) > 0.3
    cache = empty_cache(config, 1, 16)
    x, _ = jax.jit(hidden_states, static_argnums=0)(
        config, weights, jnp.array(tokens, jnp.int32)[None], cache
    )
    actual = np.asarray(logits(config, weights, x))[0]
    np.testing.assert_allclose(actual, truth, rtol=0, atol=5e-5)
