"""What a GGUF file holds, as tables for a terminal."""

from collections import defaultdict
from os import PathLike
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxkern.formats.gguf import GGUFFile, read_gguf
from jaxkern.formats.printable import printable
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS


def describe(path: str | PathLike[str]) -> Group:
    """The model, its sizes, tokenizer and formats of a GGUF file.

    Args:
      path: a GGUF file. Only its header is read.

    Returns:
      A rich renderable: `rich.print(describe(path))`.

    Raises:
      GGUFError: the file cannot be read as GGUF.
    """
    file = read_gguf(path)
    return Group(_model_table(file), _format_table(file))


def model_facts(file: GGUFFile) -> dict[str, str]:
    """What one wants to know about a model, by name; what is not there is left out."""

    def of_architecture(key: str):
        return file.metadata.get(f"{file.architecture}.{key}")

    heads, kv_heads = (
        of_architecture(f"attention.head_count{suffix}") for suffix in ("", "_kv")
    )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    facts = {
        "file": file.path,
        "name": file.metadata.get("general.name"),
        "architecture": file.architecture,
        "parameters": f"{sum(i.size for i in file.tensors.values()):,}",
        "layers": of_architecture("block_count"),
        "model dim": of_architecture("embedding_length"),
        "feed-forward dim": of_architecture("feed_forward_length"),
        "heads (key/value)": _heads(heads, kv_heads),
        "experts": of_architecture("expert_count"),
        "context length": of_architecture("context_length"),
        "vocabulary": f"{len(tokens):,}" if isinstance(tokens, list) else None,
        "tokenizer": file.metadata.get("tokenizer.ggml.model"),
        "chat template": "yes" if "tokenizer.chat_template" in file.metadata else "no",
        "licence": file.metadata.get("general.license"),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _heads(heads: Any, kv_heads: Any) -> str | None:
    """Query and key/value heads; some models have other numbers in each layer."""
    if heads is None:
        return None
    return f"{heads} ({heads if kv_heads is None else kv_heads})"


def _model_table(file: GGUFFile) -> Table:
    table = Table(show_header=False, title="Model", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in model_facts(file).items():
        table.add_row(name, Text(printable(value)))  # Text: brackets are no markup
    return table


def _format_table(file: GGUFFile) -> Table:
    """Tensors, weights and bytes of each block format, most bytes first."""
    by_type = defaultdict(list)
    for info in file.tensors.values():
        by_type[info.qtype].append(info)
    table = Table(title="Weights", title_justify="left")
    table.add_column("format")
    for name in ("tensors", "weights", "MB", "bits per weight"):
        table.add_column(name, justify="right")
    rows = [
        (qtype, len(infos), sum(i.size for i in infos), sum(i.nbytes for i in infos))
        for qtype, infos in by_type.items()
    ]
    rows.sort(key=lambda row: -row[-1])
    total = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    for row in [*rows, *([("all", *total)] if rows else [])]:
        qtype, tensors, weights, nbytes = row
        known = qtype in BLOCK_FORMATS or qtype == "all"
        table.add_row(
            qtype if known else f"{qtype} (no decoder)",
            f"{tensors:,}",
            f"{weights:,}",
            f"{nbytes / 1e6:.1f}",
            f"{8 * nbytes / weights:.2f}",
        )
    return table
