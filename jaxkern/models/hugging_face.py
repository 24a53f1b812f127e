"""What any folder of Hugging Face says: keys that change nothing, and the rotation.

Names of tensors become those of GGUF files, so that one loader serves both; the rows of
q and k lie as in the papers, in halves.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxkern import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.primitives.rope.rope_frequencies import RopeScaling

# Keys of config.json that change nothing in the logits, and why.
HARMLESS: Mapping[str, str] = {
    "model_type": "read as the architecture",
    "architectures": "the class in Python",
    "torch_dtype": "the weights say their own",
    "dtype": "the weights say their own",
    "transformers_version": "who wrote it",
    "_name_or_path": "who wrote it",
    "use_cache": "how it is run",
    "pretraining_tp": "in how many parts a product was made",
    "initializer_range": "of weights before training",
    "attention_dropout": "of training",
    "bos_token_id": "of the tokenizer",
    "eos_token_id": "of the tokenizer",
    "pad_token_id": "of the tokenizer",
    "cache_implementation": "how it is run",
    "auto_map.AutoConfig": "the class in Python",
    "auto_map.AutoModelForCausalLM": "the class in Python",
    "output_attentions": "what else is given back",
    "output_hidden_states": "what else is given back",
    "return_dict": "what else is given back",
}
WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, 1),
    "rope_parameters.partial_rotary_factor": (1.0, 1),
    "rope_parameters.full_attention.partial_rotary_factor": (1.0, 1),
    "rope_parameters.sliding_attention.partial_rotary_factor": (1.0, 1),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
}


def rope_of(
    keys: ArchitectureKeys, context: int, default: float | None = 10000.0
) -> tuple[float, RopeScaling | None]:
    """Base and scaling of `rope_parameters`, or of `rope_scaling` in older files."""
    where = "rope_parameters" if keys.has_within("rope_parameters") else "rope_scaling"
    theta = keys.number(f"{where}.rope_theta", keys.number("rope_theta", default))
    return theta, rope_scaling(keys, where, context, theta)


def rope_scaling(
    keys: ArchitectureKeys, where: str, context: int, theta: float
) -> RopeScaling | None:
    """The keys `where.*` as transformers reads them."""
    old = keys.string(f"{where}.type", "default")
    kind = keys.string(f"{where}.rope_type", old)
    if kind == "default":
        return None
    if kind == "longrope":
        return longrope(keys, where, context)
    if kind not in ("linear", "yarn", "llama3"):
        raise keys.error(
            f"{where}.rope_type",
            "known are default, linear, yarn, llama3 and longrope",
        )
    factor = keys.number(f"{where}.factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = keys.integer(f"{where}.original_max_position_embeddings", context)
    if kind == "llama3":
        low = keys.number(f"{where}.low_freq_factor")
        high = keys.number(f"{where}.high_freq_factor")
        if low >= high or original < 1:
            raise keys.error(f"{where}.low_freq_factor", f"expected less than {high}")
        return Llama3Scaling(factor, low, high, original)
    fast = keys.number(f"{where}.beta_fast", 32.0)
    slow = keys.number(f"{where}.beta_slow", 1.0)
    if fast < slow or original <= 2 * math.pi * slow or theta <= 1:
        raise keys.error(
            f"{where}.original_max_position_embeddings",
            f"YaRN from {slow} to {fast} turns needs more tokens, and a base above 1",
        )
    return YarnScaling(
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=keys.flag(f"{where}.truncate", True),
        mscale=keys.number_or_none(f"{where}.mscale"),
        mscale_all_dim=keys.number_or_none(f"{where}.mscale_all_dim"),
        attention_factor=keys.number_or_none(f"{where}.attention_factor"),
    )


def longrope(keys: ArchitectureKeys, where: str, context: int) -> LongRopeScaling:
    """One factor for each pair; where the first texts' length says, of Phi-3."""
    outside = keys.integer("original_max_position_embeddings", context)
    original = keys.integer(f"{where}.original_max_position_embeddings", outside)
    short, long = (
        tuple(keys.numbers(f"{where}.{n}_factor")) for n in ("short", "long")
    )
    if not short or len(short) != len(long) or min(*short, *long) <= 0 or original < 2:
        raise keys.error(
            f"{where}.short_factor", "expected positive numbers, as many as long_factor"
        )
    return LongRopeScaling(
        short,
        long,
        original,
        factor=keys.number(f"{where}.factor", context / original),
        attention_factor=keys.number_or_none(f"{where}.attention_factor"),
    )
