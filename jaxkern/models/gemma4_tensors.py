"""Every tensor of a Gemma 4 model, by its name in GGUF files."""

from collections.abc import Sequence

from jaxkern.models.architecture import Tensor
from jaxkern.models.gemma4 import Gemma4Config
from jaxkern.models.gemma4_experts import tensors_of_experts


def model_tensors(
    config: Gemma4Config,
    widths: Sequence[int],
    *,
    tied: bool,
    rows: int,
    apart: bool = False,
) -> dict[str, Tensor]:
    """Of a model.

    Args:
      widths: of the dense block of each layer.
      tied: the output is the embedding.
      rows: of the table of inputs of layers, where there is one.
      apart: gate and up of the experts are two tensors.
    """
    d, p = config.d_model, config.per_layer
    tensors = {
        "token_embd.weight": Tensor((config.vocabulary, d)),
        "output_norm.weight": Tensor((d,)),
    }
    if not tied:
        tensors["output.weight"] = Tensor((config.vocabulary, d))
    if p:
        tensors |= {
            "per_layer_token_embd.weight": Tensor((rows, config.layers * p)),
            "per_layer_model_proj.weight": Tensor((config.layers * p, d)),
            "per_layer_proj_norm.weight": Tensor((p,)),
        }
    for i, width in enumerate(widths):
        layer = layer_tensors(config, i, width, apart=apart)
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def layer_tensors(
    config: Gemma4Config, i: int, width: int, *, apart: bool = False
) -> dict[str, Tensor]:
    """Of a layer; with `apart` gate and up of the experts are."""
    d, p, heads = config.d_model, config.per_layer, config.heads_of(i)
    h, own = heads.head_dim, config.keys_of(i) == i
    q, k = config.heads * h, heads.kv_heads * h
    norms = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
    found = {f"{name}.weight": Tensor((d,)) for name in norms}
    found |= {
        "attn_q.weight": Tensor((q, d)),
        "attn_q_norm.weight": Tensor((h,)),
        "attn_output.weight": Tensor((d, q)),
        "attn_k.weight": Tensor((k, d), used=own),  # files may have them all the same
        "attn_k_norm.weight": Tensor((h,), used=own),
        "ffn_gate.weight": Tensor((width, d)),
        "ffn_up.weight": Tensor((width, d)),
        "ffn_down.weight": Tensor((d, width)),
        "layer_output_scale.weight": Tensor((1,)),
    }
    if not heads.keys_as_values:
        found["attn_v.weight"] = Tensor((k, d), used=own)
    if p:
        found |= {
            "inp_gate.weight": Tensor((p, d)),
            "proj.weight": Tensor((d, p)),
            "post_norm.weight": Tensor((d,)),
        }
    if config.experts:
        sizes = config.experts, config.expert_width
        found |= tensors_of_experts(d, *sizes, apart=apart)
    return found
