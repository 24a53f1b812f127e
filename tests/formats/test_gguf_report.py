"""gguf_report: the numbers of a file, and formats that cannot be decoded."""

import io

import gguf
import numpy as np
import pytest
from rich.console import Console

from jaxkern.formats.gguf import GGUFError
from jaxkern.formats.gguf_report import describe
from tests.primitives.quant.block_bytes import random_blocks


def shown(path) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(describe(path))
    return console.file.getvalue()


def row_of(text: str, name: str) -> list[str]:
    """The cells of the table row that starts with `name`."""
    (line,) = (s for s in text.splitlines() if s.strip("│ ").startswith(name + " "))
    return [cell.strip() for cell in line.strip().strip("│").split("│")]


@pytest.fixture
def writer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    yield writer
    writer.close()


def written(writer) -> str:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    return str(writer.path)


def test_numbers_of_the_file(writer):
    writer.add_context_length(8192)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_token_list(["a", "b", "c"])
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("norm", np.ones(32, np.float32))
    q4 = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("w", random_blocks("Q4_1", 1000, 64), raw_dtype=q4)
    text = shown(written(writer))
    assert row_of(text, "parameters") == ["parameters", "64,032"]
    assert row_of(text, "context length") == ["context length", "8192"]
    assert row_of(text, "heads (key/value)") == ["heads (key/value)", "9 (3)"]
    assert row_of(text, "vocabulary") == ["vocabulary", "3"]
    assert row_of(text, "chat template") == ["chat template", "yes"]
    assert row_of(text, "Q4_1") == ["Q4_1", "1", "64,000", "0.0", "5.00"]
    assert row_of(text, "all")[:3] == ["all", "2", "64,032"]


def test_a_format_without_decoder_is_marked(writer):
    raw = np.zeros((2, 40), np.uint8)
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    text = shown(written(writer))
    assert row_of(text, "Q8_1")[0] == "Q8_1 (no decoder)"
    assert row_of(text, "chat template") == ["chat template", "no"]


def test_heads_per_layer_and_brackets_in_a_name(writer):
    writer.add_head_count([4, 8])
    writer.add_name("a [bold] name")
    text = shown(written(writer))
    assert row_of(text, "heads (key/value)")[1] == "[4 8] ([4 8])"
    assert row_of(text, "name")[1] == "a [bold] name"


def test_a_name_does_not_steer_the_terminal(writer):
    writer.add_name("\x1b[2Ja\x1b]0;name\x07")
    assert row_of(shown(written(writer)), "name")[1] == "[2Ja]0;name"


def test_a_file_without_tensors(writer):
    assert row_of(shown(written(writer)), "parameters") == ["parameters", "0"]


def test_a_broken_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nonsense")
    with pytest.raises(GGUFError, match="magic"):
        describe(tmp_path / "x.gguf")
