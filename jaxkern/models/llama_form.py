"""What makes an architecture of the llama page: which tensors, which formulas.

Keys say how large a model is; some of what it computes follows from its name alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxkern.models.architecture import Tensor
from jaxkern.models.llama import LlamaConfig
from jaxkern.models.products import Activation
from jaxkern.primitives.rope.rope import Pairing

PRE_NORMS = ("attn_norm.weight", "ffn_norm.weight")
POST_NORMS = ("post_attention_norm.weight", "post_ffw_norm.weight")
HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
FFN_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
BIASES = (*QKV_BIASES, "attn_output.bias", *FFN_BIASES)
PLAIN = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "attn_output", "ffn_down")
FUSED = ("attn_qkv", "ffn_up", "attn_output", "ffn_down")  # q, k, v; gate and up


@dataclass(frozen=True)
class Form:
    """One architecture.

    Attributes:
      name: of the `Architecture`.
      norms: tensors of each layer beside the products.
      optional: tensors of a layer that a GGUF file may lack.
      needed: of those of a layer, further ones that it may not lack.
      wide_norms: q and k are normalised over all heads at once.
      fused: q, k and v are one tensor, and gate and up.
      pairing: of GGUF files; folders have the rows of q and k in halves.
      plus_one: folders store norms less 1, GGUF files do not.
      activation, scaled_embedding: see `LlamaConfig`; the scale is d_model**0.5.
      pattern: layers in a row of which the last sees every key, the others the window;
        0: all see the window, if there is one.
      rope_step: layers in a row of which the last does not rotate; 0: all rotate.
      scale_of_width: the size, in layers, whose scores are scaled by d_model // heads
        in place of head_dim; GGUF files do not say so.
      features: what config.json may say beyond what all may.
      harmless, without: more keys of config.json.
    """

    name: str
    norms: tuple[str, ...] = PRE_NORMS
    optional: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    wide_norms: bool = False
    fused: bool = False
    pairing: Pairing = "neox"
    plus_one: bool = False
    activation: Activation = "silu"
    scaled_embedding: bool = False
    pattern: int = 0
    rope_step: int = 0
    scale_of_width: int = 0
    features: tuple[str, ...] = ()
    harmless: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def products(self) -> tuple[str, ...]:
        return tuple(f"{name}.weight" for name in (FUSED if self.fused else PLAIN))


def every(step: int, layers: int) -> tuple[bool, ...] | None:
    """False in every `step`-th layer, None for a step of 0."""
    return tuple((i + 1) % step != 0 for i in range(layers)) if step else None


def tensors_of(
    config: LlamaConfig,
    form: Form,
    widths: Sequence[int],
    *,
    needed: Collection[str],
    optional: Collection[str] = (),
    model: Collection[str] = (),
) -> dict[str, Tensor]:
    """Every tensor of a model with these ones in each layer.

    Args:
      widths: of the feed-forward block of each layer.
      needed, optional: names within a layer.
      model: of the tensors outside layers that models may lack, those that it needs.
    """
    d = config.d_model
    shapes = {
        "token_embd.weight": (config.vocabulary, d),
        "output_norm.weight": (d,),
        "output.weight": (config.vocabulary, d),
        "rope_freqs.weight": (config.rotary_dim // 2,),
    }
    always = ("token_embd.weight", "output_norm.weight", *model)
    found = {name: Tensor(shape, name in always) for name, shape in shapes.items()}
    for i, width in enumerate(widths):
        layer = layer_shapes(config, form, width)
        for name in (*needed, *optional):
            found[f"blk.{i}.{name}"] = Tensor(layer[name], name in needed)
    return found


def layer_shapes(
    config: LlamaConfig, form: Form, width: int
) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a layer may have."""
    d, h = config.d_model, config.head_dim
    q, k = config.heads * h, config.kv_heads * h
    rows = {
        "attn_q": (q, d),
        "attn_k": (k, d),
        "attn_v": (k, d),
        "attn_qkv": (q + 2 * k, d),
        "attn_output": (d, q),
        "ffn_gate": (width, d),
        "ffn_up": (2 * width if form.fused else width, d),
        "ffn_down": (d, width),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": s for n, s in rows.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in rows.items()}
    shapes |= {name: (d,) for name in (*PRE_NORMS, *POST_NORMS)}
    wide = (q, k) if form.wide_norms else (h, h)
    return shapes | {n: (s,) for n, s in zip(HEAD_NORMS, wide, strict=True)}
