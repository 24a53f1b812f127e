"""What is trained: every weight of a model, or adapters beside a frozen one."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.models.adapted import adapters_of, with_adapters
from jaxkern.models.loader import load_described, open_model
from jaxkern.models.registry import Described, described
from jaxkern.train.arithmetic import operations_per_token
from jaxkern.train.model_folder import origins_of, write_model_folder
from jaxkern.train.new_model import NewWeights, new_model
from jaxkern.train.next_token_loss import mean_loss, next_token_loss, remat_options
from jaxkern.train.run_config import Lora, RunConfig
from jaxkern.train.texts import BYTES, ByteTokenizer, tokenizer_of

Loss = tuple[Float[Array, ""], Float[Array, ""]]


@dataclass(frozen=True)
class Job:
    """One model to train.

    Attributes:
      params: before the first step.
      base: what the loss reads beside them and nobody changes, None for nothing.
      loss: of params, base and a batch; see `next_token_loss`.
      tokenizer: of the texts.
      vocabulary: tokens that the model knows.
      operations: of one token of a step.
      write: writes the result into a folder, of params whole in memory; returns what it
        wrote.
    """

    params: Any
    base: Any
    loss: Callable[[Any, Any, Any], Loss]
    tokenizer: Any
    vocabulary: int
    operations: float
    write: Callable[[Any, str], str]


def job_of(run: RunConfig) -> Job:
    """The job of a run, its weights loaded or drawn.

    Raises:
      ValueError: the model cannot be read, or not trained so.
      OSError: a file cannot be opened.
    """
    path = run.model.get("path")
    if path is not None and not isinstance(path, str):
        raise ValueError(f"model.path must be a text, got {path!r}.")
    if run.lora is not None and path is None:
        raise ValueError("lora: a new model has no weights to adapt. Give model.path.")
    tokenizer = tokenizer_of(run.data.tokenizer, path)
    if run.lora is not None:
        return adapter_job(run, run.lora, path or "", tokenizer)
    keys: Mapping[str, Any] | None = None
    if path is None:
        keys = {"vocab_size": tokenizer.num_tokens, **run.model}
        model = new_model(keys, run.seed)
        reader = NewWeights(model.file, model.tensors, "train")
        config = replace(model.config, **reader.numerics)
        weights = model.architecture.weights(config, reader)
    else:
        model = described(open_model(path))
        config, weights = load_described(model, "train")
    loss = next_token_loss(config, remat=run.remat, product_dtype=run.product_dtype)
    return Job(
        params=weights,
        base=None,
        loss=lambda params, base, batch: loss(params, batch),
        tokenizer=tokenizer,
        vocabulary=config.vocabulary,
        operations=operations_per_token(model, run.data.length),
        write=writer_of(model, path, keys, tokenizer),
    )


def writer_of(
    model: Described, path: str | None, keys: Mapping[str, Any] | None, tokenizer: Any
) -> Callable[[Any, str], str]:
    """Writes trained weights as a folder, where this model can be written as one."""

    def write(params: Any, out: str) -> str:
        if path is not None and not os.path.isdir(path):
            return (
                "no model folder: a GGUF file has no config.json; load() reads the "
                "checkpoints' arrays"
            )
        try:
            origins_of(model)
        except ValueError as error:
            return f"no model folder: {error}"
        folder = os.path.join(out, "model")
        write_model_folder(folder, model, params, config=keys, source=path)
        if isinstance(tokenizer, ByteTokenizer) and model.config.vocabulary > BYTES:
            tokenizer.save(folder)
        return folder

    return write


def adapter_job(run: RunConfig, lora: Lora, path: str, tokenizer: Any) -> Job:
    """Adapters of a model that stays as it is."""
    if run.product_dtype is not None:
        raise ValueError("product_dtype: adapters are not trained with 8-bit products.")
    from jaxkern.models.adapter import NewAdapter, write_adapter
    from jaxkern.primitives.quant.gguf_blocks import FLOAT_TYPES

    model = described(open_model(path))
    policy: Any = lora.weights
    if policy == "auto":
        kinds = {info.qtype for info in model.file.tensors.values()}
        narrow = "bf16" if run.compute_dtype == "bfloat16" else "f32"
        policy = "packed" if kinds - {*FLOAT_TYPES} else narrow
    if policy in ("packed_int8", "fp8_experts", "train") or (
        policy == "f32" and run.compute_dtype != "float32"
    ):
        raise ValueError(
            f"lora.weights: {policy} is not trained with {run.compute_dtype}. Take "
            "auto, packed, bf16, or f32 with float32."
        )
    source = NewAdapter(lora.rank, lora.alpha, lora.targets, run.seed)
    config, weights = load_described(model, policy, source)
    config = replace(config, dtype=run.compute_dtype, product_dtype=None)
    base = (weights, output_rows(model, weights, config.dtype))
    hidden = remat_options(config, run.remat)

    def loss(params: Any, base: Any, batch: Any) -> Loss:
        weights, output = base
        if output is None:
            output = plain_rows(weights.output[0], config.d_model)
        whole = with_adapters(weights, params)
        return mean_loss(config, whole, output, batch, hidden=hidden, loss={})

    def write(params: Any, out: str) -> str:
        folder = os.path.join(out, "adapter")
        whole = with_adapters(weights, params)
        write_adapter(folder, model, whole, rank=lora.rank, alpha=lora.alpha, base=path)
        if not lora.merge:
            return folder
        return f"{folder}, {write_merged(model, path, folder, out, tokenizer)}"

    params = adapters_of(weights)
    if not params:
        raise ValueError("lora.targets: is empty, so there is nothing to train.")
    plain = sum(p.size for p in jax.tree.leaves(params))
    frozen = operations_per_token(model, run.data.length, frozen=True)
    return Job(
        params=params,
        base=base,
        loss=loss,
        tokenizer=tokenizer,
        vocabulary=config.vocabulary,
        operations=frozen + 6 * plain,
        write=write,
    )


def write_merged(
    model: Described, path: str, adapter: str, out: str, tokenizer: Any
) -> str:
    """The model with the adapter added, as a folder."""
    from jaxkern.models.adapter import read_adapter

    _, weights = load_described(model, "train", read_adapter(adapter), merge=True)
    return writer_of(model, path, None, tokenizer)(weights, out)


def output_rows(
    model: Described, weights: Any, dtype: str
) -> Float[Array, "v d"] | None:
    """The product to logits decoded, once, or None where it is plain already."""
    from jaxkern import GGUFTensor, dequantize

    (output, *_) = weights.output
    if isinstance(output, jax.Array):
        return None
    own = "output.weight" in model.file.tensors
    w = model.file.load("output.weight" if own else "token_embd.weight")
    if isinstance(w, GGUFTensor):
        return dequantize(w, dtype=dtype)
    return jnp.asarray(w, dtype)


def plain_rows(output: Array, d: int) -> Float[Array, "v d"]:
    """The rows of an output that lies as `jaxkern.models.products.Matrix` says."""
    across = output.dtype == jnp.float32 and output.shape[0] == d
    return output.T if across else output
