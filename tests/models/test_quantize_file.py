"""`jaxkern quantize`: what it writes, the `gguf` package and our loader read."""

import re

import gguf
import numpy as np
import pytest

from jaxkern.formats.gguf import read_gguf
from jaxkern.formats.gguf_mix import MIXES, SMALLER_BLOCKS, qtype_in_mix
from jaxkern.models import load
from jaxkern.models import quantize_file as module
from jaxkern.models.command_line import main
from jaxkern.models.quantize_file import quantize_file
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PIECES", (2048, 1024))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_wide(path, layers=16):
    """Rows of 512 weights, two in each tensor; no whole model."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_array("some.list", ["a", "b"])
    writer.add_uint64("some.count", 2**40)
    names = [f"blk.{i}.{part}" for i in range(layers) for part in ("attn_v", "ffn_up")]
    for name in ["token_embd", "output", *names, "blk.0.attn_norm"]:
        shape = (512,) if "norm" in name else (2, 512)
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_mix_on_blocks_of_256(tmp_path):
    """Bytes, keys with their types, and errors, all read by the other reader."""
    source = write_wide(tmp_path / "in.gguf")
    reports = quantize_file(source, tmp_path / "out.gguf", "Q4_K_M")
    before, after = (gguf.GGUFReader(tmp_path / f"{n}.gguf") for n in ("in", "out"))
    for name in "some.list", "some.count", "llama.block_count":
        assert after.fields[name].contents() == before.fields[name].contents()
        assert after.fields[name].types == before.fields[name].types
    assert after.fields["general.file_type"].contents() == 15
    stored = {t.name: t for t in after.tensors}
    assert [r.name for r in reports] == [t.name for t in before.tensors]
    for t, report in zip(before.tensors, reports, strict=True):
        new = stored[t.name]
        assert new.tensor_type.name == report.after
        assert new.n_bytes == report.nbytes
        values = gguf.quants.dequantize(new.data, new.tensor_type)
        difference = values.reshape(t.data.shape) - t.data
        error = np.sqrt(np.sum(difference**2) / np.sum(t.data**2))
        np.testing.assert_allclose(report.error, error, rtol=1e-4, atol=1e-7)
        most = {"F32": 0, "Q4_K": 0.09, "Q6_K": 0.025}[report.after]
        assert error <= most
        np.testing.assert_allclose(report.largest, np.abs(difference).max(), rtol=1e-5)
    values = [
        i for i in range(16) if stored[f"blk.{i}.attn_v.weight"].tensor_type == 14
    ]
    assert values == [0, 1, 4, 7, 10, 13, 14, 15]  # Q6_K: both ends and every third
    assert stored["output.weight"].tensor_type.name == "Q6_K"
    assert stored["token_embd.weight"].tensor_type.name == "Q4_K"
    assert stored["blk.0.attn_norm.weight"].tensor_type.name == "F32"


@pytest.mark.parametrize("mix", ["Q3_K_M", "Q8_0"])
def test_our_loader_reads_it(tmp_path, mix):
    """Rows of 64 and 96: no blocks of 256, so smaller ones; again it is the same."""
    source = write_tiny_gguf(tmp_path / "in.gguf", "qwen3", tied=True)
    target, again = tmp_path / "out.gguf", tmp_path / "again.gguf"
    reports = quantize_file(source, target, mix)
    load(target, "packed")
    types = {report.after for report in reports}
    mixed = {"F32", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0"}  # for Q3_K Q4_K Q5_K Q6_K
    assert types == ({"F32", "Q8_0"} if mix == "Q8_0" else mixed)
    assert all(r.error < 0.1 for r in reports)
    repeated = quantize_file(target, again, mix)
    assert all(r.error == 0 for r in repeated) and again.stat().st_size > 0


def test_every_mix_fits_every_row():
    """Its formats have encoders, for rows of 256, 32 and other multiples."""
    for mix in MIXES:
        for kind in "attn_v", "ffn_down", "attn_output", "ffn_up":
            for i in range(16):
                for d in 512, 96, 40:
                    found = qtype_in_mix(
                        mix,
                        f"blk.{i}.{kind}.weight",
                        (4, d),
                        layers=16,
                        tied=False,
                        gqa=1,
                    )
                    assert d % BLOCK_FORMATS[found].elements == 0, (mix, kind, d)
                    assert d == 40 or found not in ("F16",) or mix == "F16"
        enum = "ALL_F32" if mix == "F32" else f"MOSTLY_{mix}"
        assert enum in gguf.LlamaFileType.__members__
    assert qtype_in_mix(
        "Q2_K", "blk.9.attn_v.weight", (4, 256), layers=16, tied=False, gqa=4
    ) == ("Q4_K")
    for kind in "attn_norm", "ffn_gate_inp", "ssm_conv1d":
        name = f"blk.0.{kind}.weight"
        options = {"layers": 16, "tied": False, "gqa": 1}
        assert qtype_in_mix("Q4_K_M", name, (4, 256), **options) is None
    assert {*SMALLER_BLOCKS.values()} <= {*BLOCK_FORMATS}


def test_command(tmp_path, capsys):
    """A table, the next tokens beside the first model's, and what is refused."""
    source = str(write_tiny_gguf(tmp_path / "in.gguf", "llama"))
    target, text = str(tmp_path / "out.gguf"), tmp_path / "text"
    text.write_text("the sand and the hand " * 10)
    arguments = ["quantize", source, target, "--to"]
    assert main([*arguments, "Q4_K_S", "--text", str(text)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"blk\.0\.ffn_down\.weight +│ Q8_0 +│ Q5_0 +│ +0\.00 │ +\d\.", out)
    found = re.search(r"KL (\d\.\d+) on average, (\d\.\d+) at most; (\S+)", out)
    assert found
    mean, most, agree = map(float, found.groups())
    assert 0 < mean < most < 0.5 and agree > 80
    before = read_gguf(target).nbytes
    for changed, message in (
        ([*arguments, "Q4_K_M"], "is there already"),
        ([*arguments, "Q9"], "no 'Q9', but F32, F16, BF16, Q4_0"),
        (["quantize", str(tmp_path), target, "--to", "Q8_0"], "is a folder"),
        ([*arguments[:2], f"{target}/x", "--to", "Q8_0"], "Not a directory"),
        (
            [*arguments[:2], f"{target}2", "--to", "F16", "--text", "/no"],
            "No such file",
        ),
    ):
        assert main([*changed, "--quiet"]) == 2
        out, err = capsys.readouterr()
        assert message in err and (out, err.count("\n")) == ("", 1)
    assert read_gguf(target).nbytes == before
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"in.gguf", "out.gguf", "text", "cache"}, "no temporary file stays"


def test_weights_that_are_not_finite(tmp_path):
    source = write_wide(tmp_path / "in.gguf", layers=1)
    content = bytearray(source.read_bytes())
    content[-512 * 4 * 3 : -512 * 4 * 3 + 4] = np.float32(np.nan).tobytes()
    source.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"ffn_up.weight has weights that are not fini"
    ):
        quantize_file(source, tmp_path / "out.gguf", "Q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
