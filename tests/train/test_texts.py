"""Texts from files and records, and the tokenizer of bytes."""

import pytest

from jaxkern.models.hugging_face_tokenizer import tokenizer_from_folder
from jaxkern.train.run_config import Data
from jaxkern.train.texts import ByteTokenizer, encoded, texts_of, tokenizer_of

TEXT = "one\ntwo\n\n \nthrée\n"


def test_documents_are_files_lines_or_paragraphs(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(TEXT.replace("one", name))
    files = (str(tmp_path / "*.txt"), str(tmp_path / "a.txt"))  # each file once

    def found(kind):
        return [*texts_of(Data(files=files, documents=kind))]

    assert found("files") == [TEXT.replace("one", n) for n in ("a.txt", "b.txt")]
    assert found("lines")[:4] == ["a.txt", "two", "thrée", "b.txt"]
    assert found("paragraphs")[:2] == ["a.txt\ntwo", "thrée\n"]
    with pytest.raises(ValueError, match=r"data.files: there is no file .*nothing"):
        [*texts_of(Data(files=(str(tmp_path / "nothing"),)))]
    (tmp_path / "c.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="is not UTF-8 at byte 2"):
        found("files")


def test_bytes_are_tokens_also_of_the_saved_tokenizer(tmp_path):
    """Which `generate` reads from the folder of a model that was trained on bytes."""
    ours = ByteTokenizer()
    ours.save(str(tmp_path))
    theirs = tokenizer_from_folder(tmp_path)
    text = "".join(map(chr, range(1, 1200)))
    assert ours.encode(text) == theirs.encode(text) == [*text.encode()]
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_id == ours.eos_id and theirs.num_tokens == ours.num_tokens
    (tokens,) = encoded(iter(["ab"]), ours, 257)
    assert tokens.tolist() == [97, 98, 256]
    with pytest.raises(ValueError, match="has 257 tokens, the model knows 256"):
        encoded(iter([]), ours, 256)
    assert tokenizer_of(str(tmp_path), None).num_tokens == 257
    with pytest.raises(ValueError, match="but the model is new"):
        tokenizer_of("model", None)


def test_records_are_texts(tmp_path):
    pytest.importorskip("grain")
    from array_record.python.array_record_module import ArrayRecordWriter

    path = str(tmp_path / "x.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for text in ("one", "zwei\n"):
        writer.write(text.encode())
    writer.close()
    assert [*texts_of(Data(records=(path,)))] == ["one", "zwei\n"]
