"""Tokenizers and settings of folders; `generate` and `chat` from one."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from jaxkern.formats.safetensors import SafetensorsError
from jaxkern.models.command_line import main
from jaxkern.models.hugging_face_tokenizer import (
    sampling_from_folder,
    tokenizer_from_folder,
)
from jaxkern.models.sampling import Sampling

WEIGHTS = Path(__file__).parent.parent / "golden" / "transformers" / "qwen3_tied"
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }} "
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write_tokenizer(folder, **settings):
    """Letters, a space and control tokens: 4 + 27 ids, BOS first by its own rule."""
    letters = [chr(c) for c in range(97, 123)]
    vocabulary = {t: i for i, t in enumerate([*SPECIAL, *letters, "Ġ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    shutil.copytree(WEIGHTS, place)
    return write_tokenizer(place, chat_template=TEMPLATE)


def test_texts_and_ends(folder):
    """Nothing read tokenizer.json: a folder answered with token ids alone."""
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("abc abcdef") == [0, 4, 5, 6, 30, 4, 5, 6, 7, 8, 9]
    assert tokenizer.encode("ab</s>")[:3] == [0, 4, 5]  # text of others: no control
    assert 1 not in tokenizer.encode("ab</s>")
    text = tokenizer.chat([{"role": "user", "content": "ab"}])
    assert text.startswith("<s><|im_start|>user ab<|im_end|><|im_start|>assistant ")
    assert tokenizer.encode(text, special=True)[:2] == [0, 2]  # one BOS, the template's
    assert tokenizer.decode([0, 4, 5, 30, 6, 1]) == "ab c"
    assert tokenizer.continued("<|im_end|>a") == [3, 4]
    assert tokenizer.continued("a<|im_end|>") is None
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.stop_ids == {1, 3}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert tokenizer_from_folder(folder).stop_ids == {1, 3, 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert tokenizer_from_folder(folder).stop_ids == {1, 3, 7, 8}


def test_where_the_template_stands(folder):
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    write_tokenizer(folder, chat_template=named)
    assert tokenizer_from_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("its own")
    assert tokenizer_from_folder(folder).chat_template == "its own"
    write_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        ValueError, match=r"has no chat_template\.jinja, .* Use generate --raw"
    ):
        tokenizer_from_folder(folder).chat([])


def test_settings_of_sampling(folder):
    assert sampling_from_folder(folder) == Sampling()
    place = folder / "generation_config.json"
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    place.write_text(json.dumps(said))
    assert sampling_from_folder(folder) == Sampling(repetition=1.05)
    place.write_text(json.dumps(said | {"do_sample": True, "min_p": None}))
    assert sampling_from_folder(folder) == Sampling(0.6, 20, 0.95, repetition=1.05)
    for key, value in ("temperature", '"hot"'), ("top_k", "1e999"), ("top_k", "NaN"):
        place.write_text(f'{{"do_sample": true, "{key}": {value}}}')
        with pytest.raises(SafetensorsError, match=rf"{key} of .*, expected a number"):
            sampling_from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", '{"eos_token": "?"}', "'?', which is no token of"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template of .* text"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x', exp"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id is "),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)
def test_damaged_files(folder, name, content, message):
    place = folder / name
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SafetensorsError, match=message.replace("?'", r"\?'")):
        tokenizer_from_folder(folder)


def test_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SafetensorsError, match=r"has no file tokenizer\.json"):
        tokenizer_from_folder(folder)


def test_generate_and_chat(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = {"do_sample": True, "temperature": 0.8, "eos_token_id": 50}
    (folder / "generation_config.json").write_text(json.dumps(said))
    arguments = ["generate", "--model", str(folder), "--prompt", "ab", "--json"]
    assert main([*arguments, "--max-tokens", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "sample" in report["implementations"]["prefill"], "as the folder says"
    assert len(report["answers"][0]["token_ids"]) == 1
    lines = iter(["ab", "/quit"])
    monkeypatch.setattr("builtins.input", lambda mark="": next(lines))
    assert main(["chat", str(folder), "--max-tokens", "1", "--slots", "128"]) == 0
    assert capsys.readouterr().err.count("[read ") == 1
    (folder / "generation_config.json").write_text('{"eos_token_id": 9999}')
    assert main(arguments) == 2
    assert "the tokens that end an answer are [1, 3, 9999]" in capsys.readouterr().err
