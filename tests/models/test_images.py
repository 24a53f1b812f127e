"""Models that see, against `transformers`: pixels, features, gradients, answers.

The folders are those of test_architectures, which reads text alone: no image ever came
into a model there, and no token had more than one position.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from PIL import Image
from safetensors.flax import load_file, save_file

from jaxkern.formats.safetensors import SafetensorsError
from jaxkern.models import generate as generator
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.command_line import main
from jaxkern.models.conversation import Conversation
from jaxkern.models.generate import generate
from jaxkern.models.image_prompts import batch_of, with_images
from jaxkern.models.image_rule import (
    ImageRule,
    preprocess,
    rgb,
    rule_of_folder,
    size_of,
)
from jaxkern.models.qwen3_vl import hidden_states
from jaxkern.models.vision_tower import Patches, image_features
from jaxkern.models.weight_reader import Policy
from jaxkern.train import next_token_loss
from tests.models.tiny_gguf import write_tiny_gguf

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers_vision"
SMALL = (  # by transformers' rule with 256 to 1024 pixels in steps of 8
    *((600, 5, 344, 8), (4, 800, 8, 232), (8, 8, 16, 16)),
    *((33, 32, 32, 32), (7, 90, 8, 88)),
)
DENSE, EXPERTS = "qwen3_vl", "qwen3_vl_moe"
BOTH = [DENSE, pytest.param(EXPERTS, marks=pytest.mark.full)]


@functools.cache
def golden(name):
    return dict(np.load(GOLDEN / name / "images.npz"))


def shown(name):
    return [Image.fromarray(golden(name)[f"image{i}"]) for i in (0, 1)]


@functools.cache
def loaded(name, policy: Policy = "f32"):
    return load(GOLDEN / name, policy)


@functools.cache
def prompt(name):
    """The text of the golden file with its two images."""
    return with_images(loaded(name)[0], golden(name)["prompt"].tolist(), shown(name))


def test_pixels_and_positions():
    said, text = golden(DENSE), prompt(DENSE)
    found = np.concatenate([picture.numbers for picture in text.pictures])
    np.testing.assert_allclose(found, said["pixels"], rtol=0, atol=1e-5)
    grids = [(1, picture.rows, picture.columns) for picture in text.pictures]
    np.testing.assert_array_equal(grids, said["grids"])
    np.testing.assert_array_equal(text.tokens, said["tokens"])
    np.testing.assert_array_equal(text.positions.T, said["positions"])
    config, _ = loaded(DENSE)
    for rows, columns, height, width in SMALL:
        assert size_of(rows, columns, 8, config.image_rule) == (height, width)
    rule = dataclasses.replace(config.image_rule, least=2**16, most=2**24)
    for rows, columns, height, width in said["sizes"].tolist():
        assert size_of(rows, columns, 32, rule) == (height, width)


def test_the_text_goes_on_past_the_larger_side():
    """Both images of the golden text are wider than high."""
    config, _ = loaded(DENSE)
    tall = preprocess(Image.new("RGB", (16, 40)), config)
    assert (tall.rows, tall.columns) == (10, 4)
    text = with_images(config, [5, config.image_token, 6, 7], [tall])
    assert text.positions[0].tolist() == [0, 0, 0]
    time, row, column = text.positions[1:-2].T
    assert (time == 1).all()
    assert row.tolist() == [1 + i for i in range(5) for _ in range(2)]
    assert column.tolist() == [1, 2] * 5
    assert text.positions[-2:].tolist() == [[6] * 3, [7] * 3]


def test_images_of_any_kind(tmp_path):
    """Modes of Pillow, and a file that lies on its side."""
    pixels = golden(DENSE)["image1"]
    image = Image.fromarray(pixels)
    alpha = pixels[..., 3:] / 255
    on_white = pixels[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(rgb(image) - on_white).max() <= 1
    grey = image.convert("RGB").convert("L")
    np.testing.assert_array_equal(rgb(grey), np.stack([np.asarray(grey)] * 3, axis=-1))
    palette = image.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE)
    palette.info["transparency"] = 0
    clear = np.asarray(palette) == 0
    assert clear.any() and (rgb(palette)[clear] == 255).all()
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter to the right
    path = tmp_path / "turned.png"
    image.convert("RGB").save(path, exif=exif)
    upright = np.rot90(np.asarray(image.convert("RGB")), -1)
    np.testing.assert_array_equal(rgb(path), upright)


@pytest.mark.parametrize("name", BOTH)
def test_features_and_logits(name):
    """Of two images of different sizes in a text, in two rows that are filled up."""
    (config, weights), said, text = loaded(name), golden(name), prompt(name)
    page, slots = page_of(config), len(text.tokens) + 3
    images = batch_of(config, [text, text], slots, text.patches + 8)
    # what fills up is not zero, and says nothing
    seen = images.seen
    assert isinstance(seen, Patches)
    seen.numbers[:, text.patches :] = 100.0
    tokens = np.full((2, slots), 5, np.int32)
    tokens[:, : len(text.tokens)] = text.tokens
    # the second row ends behind its first image
    cut = int(np.flatnonzero(text.feature == 14)[0]) + 2
    tokens, lengths = jnp.array(tokens), jnp.array([len(text.tokens), cut])

    @jax.jit
    def computed(weights, images):
        features = image_features(config.vision, config, weights.vision, images.seen)
        cache = page.empty_cache(config, 2, 64)
        images = images._replace(seen=features)
        first, cache = prefill(config, weights, tokens, lengths, cache, images)
        # and its other tokens are read behind the first ones, in the second image too
        rest = jnp.roll(tokens, -cut, axis=1)
        more = images._replace(
            feature=jnp.roll(images.feature, -cut, axis=1),
            positions=jnp.roll(images.positions, -cut, axis=1),
        )
        left = jnp.array([0, len(text.tokens) - cut])
        second, cache = prefill(config, weights, rest, left, cache, more)
        # a token of text behind, whose position only the cache knows
        last, _ = decode(
            config, weights, jnp.array(said["greedy"][:1].repeat(2)), cache
        )
        return features, first, second, last

    features, first, second, last = computed(weights, images)
    count = len(said["features"])
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    assert np.std(said["features"]) > 0.3 and np.std(said["logits"]) > 0.3
    for row in (0, 1):
        close(features.rows[row, :count], said["features"])
        for level, truth in zip(features.deep, said["deep"], strict=True):
            close(level[row, :count], truth)
    close(first, said["logits"][[-1, cut - 1]])
    close(second[1], said["logits"][-1])
    close(last[0], last[1])
    assert int(last[0].argmax()) == said["greedy"][1]


@pytest.mark.parametrize("name", BOTH)
def test_training(name):
    """Gradients of the loss with images, of text and tower."""
    (config, weights), said, text = loaded(name, "train"), golden(name), prompt(name)
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    loss, tokens = next_token_loss(config), jnp.array(text.tokens)[None]
    batch = {
        "tokens": tokens,
        "mask": tokens != config.image_token,
        "images": batch_of(config, [text], len(text.tokens), text.patches),
    }
    grads = jax.jit(jax.grad(lambda w, batch: loss(w, batch)[0]))(weights, batch)
    tower = grads.vision
    for found, key in (
        (grads.embedding, "embedding_grad"),
        (tower.patch.reshape(said["patch_grad"].shape), "patch_grad"),
        (tower.places, "place_grad"),
        (tower.deep[1].down.bias, "deep_grad"),
    ):
        assert np.abs(said[key]).max() > 1e-3, key
        np.testing.assert_allclose(found, said[key], rtol=0, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", BOTH)
def test_greedy_answers(name):
    """32 tokens by cached decode, beside one image and text alone in one batch."""
    (config, weights), said = loaded(name), golden(name)
    text = np.load(GOLDEN / name / "golden.npz")
    whole, plain = said["prompt"].tolist(), text["tokens"][:9].tolist()
    prompts, images = [whole, whole[:9], plain], [shown(name), shown(name)[:1], []]
    answers = generate(config, weights, prompts, images=images, max_tokens=32, chunk=31)
    assert answers[0] == said["greedy"].tolist()
    assert answers[2] == text["greedy"].tolist()


def test_a_conversation_reads_an_image_once():
    """The golden text in three turns: an image, another one, and an answer goes on."""
    (config, weights), said = loaded(DENSE), golden(DENSE)
    text, pictures = said["prompt"].tolist(), prompt(DENSE).pictures
    first, second = (len(picture.numbers) // 4 for picture in pictures)
    greedy = said["greedy"].tolist()
    talk = Conversation(config, weights, slots=128, chunk=4)

    def answer(ids, images, count):
        return [
            t for ts in talk.answer(ids, images=images, max_tokens=count) for t in ts
        ]

    answer(text[:9], pictures[:1], 1)
    talk.ids.pop()  # what it would say is not read yet, and the text goes on otherwise
    assert answer(text, pictures, 5) == greedy[:5]
    assert talk.kept == 9 - 1 + first
    assert talk.filled == len(text) + 5 - 2 + first + second
    assert answer(talk.ids, pictures, 5) == greedy[5:10]
    assert talk.kept == talk.filled - 6, "the last token was not read yet"
    other = pictures[0]._replace(numbers=-pictures[0].numbers)
    answer([*talk.ids, 7], [other, pictures[1]], 1)
    assert talk.kept == 0, "the same text of other images"


def published(folder):
    """The folder with experts as the published files have them."""
    weights = load_file(folder / "model.safetensors")
    for key, w in weights.items():
        if "mlp.experts" in key:
            weights[key] = jnp.swapaxes(w, 1, 2)
    save_file(weights, folder / "model.safetensors")


def test_experts_lie_in_two_ways(tmp_path):
    """Golden folders are saved by new versions, which keep rows where columns were."""
    folder = shutil.copytree(GOLDEN / EXPERTS, tmp_path / "m")
    published(folder)
    same = jax.tree.map(np.array_equal, load(folder, "f32"), loaded(EXPERTS))
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", ["blocks.3.norm1.weight", "merger.norm.scale"])
def test_tensors_of_another_tower(name, tmp_path):
    folder = shutil.copytree(GOLDEN / DENSE, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights[f"model.visual.{name}"] = jnp.ones(24)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SafetensorsError, match=f"model.visual.{name}.? has no place"):
        load(folder, "f32")
    del weights[f"model.visual.{name}"], weights["model.visual.pos_embed.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SafetensorsError, match=r"no tensor model\.visual\.pos_embed"):
        load(folder, "f32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": "x"}, "image_token_id is 'x', expected an integer"),
        ({"vision_config": {"depth": 2}}, "deepstack_visual_indexes is .*2 blocks"),
        ({"vision_config": {"num_heads": 4}}, "24 dims are no multiple of 4"),
        ({"vision_config": {"hidden_act": "silu"}}, "hidden_act is 'silu'"),
        ({"vision_config": {"num_position_embeddings": 26}}, "expected a square"),
        ({"vision_config": {"out_hidden_size": 16}}, "the text has 32"),
        ({"vision_config": {"window": 3}}, "window is 3, which the model"),
        ({"vision_config": {"in_channels": 4}}, "red, green and blue"),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [4, 2, 1]}}},
            "expected 8 pairs in all",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_interleaved": False}}},
            "mrope_interleaved is False",
        ),
    ],
)  # fmt: skip
def test_keys_that_say_another_model(change, message, tmp_path):
    folder = shutil.copytree(GOLDEN / DENSE, tmp_path / "m")
    said = json.loads((folder / "config.json").read_text())

    def put(into, new):
        for key, value in new.items():
            if isinstance(value, dict):
                put(into[key], value)
            else:
                into[key] = value

    put(said, change)
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(SafetensorsError, match=message):
        load(folder, "f32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_resize": False}, "do_resize is False, expected true"),
        ({"patch_size": 8}, "patch_size is 8, expected 4, as config.json says"),
        ({"size": {"height": 4, "width": 4}}, "size is .*, expected shortest_edge"),
        ({"min_pixels": 2048}, "expected shortest_edge up to longest_edge"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std is .*positive"),
        ({"do_center_crop": True}, "do_center_crop is True, which is not understood"),
        ({"resample": 9}, "resample is 9, expected 0 to 5"),
    ],
)
def test_rules_that_make_other_pixels(change, message, tmp_path):
    said = json.loads((GOLDEN / DENSE / "preprocessor_config.json").read_text())
    path, vision = tmp_path / "preprocessor_config.json", loaded(DENSE)[0].vision
    path.write_text(json.dumps(said | change))
    with pytest.raises(SafetensorsError, match=message):
        rule_of_folder(str(tmp_path), vision)
    path.unlink()
    whole = tmp_path / "processor_config.json"
    whole.write_text(json.dumps({"image_processor": said}))
    assert rule_of_folder(str(tmp_path), vision) == loaded(DENSE)[0].image_rule
    published = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
    published |= {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    published |= {
        "image_mean": [0.0, 0.5, 0.5],
        "image_std": [0.5] * 3,
        "crop_size": None,
    }
    published |= {"image_processor_type": "Qwen2VLImageProcessorFast"}
    path.write_text(json.dumps(published))
    rule = rule_of_folder(str(tmp_path), vision)
    assert rule == ImageRule(2**16, 2**24, (0.0, 0.5, 0.5), (0.5,) * 3, 1 / 255, 3)
    path.unlink()
    whole.write_text('{"processor_class": "Qwen3VLProcessor"}')
    assert rule_of_folder(str(tmp_path), vision) is None
    whole.write_text("{")
    with pytest.raises(SafetensorsError, match=r"processor_config\.json is not JSON"):
        rule_of_folder(str(tmp_path), vision)


TEMPLATE = (  # an image is a part of a message, as in the templates of such models
    "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def write_tokenizer(folder, config):
    """Letters, and control tokens where the model has its placeholders."""
    vocabulary = {chr(97 + i): i for i in range(26)}
    vocabulary |= {f"[{i}]": i for i in range(26, 91)}
    control = ["<|im_start|>", "<|image_pad|>", "<|video_pad|>"]
    control += ["<|vision_start|>", "<|vision_end|>"]
    first = config.image_token - 1
    vocabulary |= {name: i for i, name in enumerate(control, first)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    special = [tokenizers.AddedToken(name, normalized=False) for name in control]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": "[90]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def test_the_command_line_shows_images(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shutil.copytree(GOLDEN / DENSE, tmp_path / "m")
    config, weights = loaded(DENSE)
    write_tokenizer(folder, config)
    names = []
    for i, image in enumerate(shown(DENSE)):
        names.append(str(tmp_path / f"{i}.png"))
        image.save(names[-1])
    arguments = ["generate", "--model", str(folder), "--max-tokens", "1", "--json"]
    arguments += ["--weights", "f32", "--prompt", "ab", "--image", names[0]]
    assert main([*arguments, "--image", names[1]]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    features = [len(picture.numbers) // 4 for picture in prompt(DENSE).pictures]
    assert answer["prompt_tokens"] == 1 + sum(features) + 2 * 2 + 2
    placed = [94, 92, 95]  # start, placeholder, end
    ids = [91, *placed, *placed, 0, 1]
    expected = generate(config, weights, [ids], images=[shown(DENSE)], max_tokens=1)
    assert [answer["token_ids"]] == expected
    assert main([*arguments, "--raw"]) == 2
    assert "--image: has no place in a --raw prompt" in capsys.readouterr().err
    saved = tmp_path / "talk.json"
    lines = [f"/image {names[0]}", f"/image {tmp_path / 'none.png'}", "ab", "/stats"]
    lines += [f"/save {saved}", "/clear", f"/load {saved}", "/quit"]
    left = iter(lines)
    monkeypatch.setattr("builtins.input", lambda mark="": next(left))
    options = ["--max-tokens", "1", "--slots", "64", "--weights", "f32"]
    assert main(["chat", str(folder), *options]) == 0
    said = capsys.readouterr().err
    assert "(10 x 6 patches, with the next message)" in said
    assert "No such file" in said
    assert f"[read {1 + features[0] + 2 + 2} tokens" in said
    assert f"{1 + features[0] + 2 + 2 + 1} of 64 slots" in said
    parts = json.loads(saved.read_text())["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"]
    assert "(2 messages)" in said


def test_what_is_refused(tmp_path, monkeypatch):
    config, weights = loaded(DENSE)
    image, (start, end) = Image.new("RGB", (8, 8)), (94, 95)
    text = [5, start, config.image_token, end]
    with pytest.raises(ValueError, match="1 placeholders of images, token 92, for 2"):
        generate(config, weights, [text], images=[[image] * 2], max_tokens=1)
    with pytest.raises(ValueError, match="a list for each prompt, got 2 for 1"):
        generate(config, weights, [text], images=[[image], []], max_tokens=1)
    two = batch_of(config, [with_images(config, text, [image])] * 2, 9, 16)
    with pytest.raises(ValueError, match=r"`tokens` are \(1, 9\), .* of \(2, 9\)"):
        hidden_states(config, weights, jnp.zeros((1, 9), jnp.int32), images=two)
    monkeypatch.setattr(generator, "compiled_in_turn", lambda *_: None)
    small = generator.Generator(
        config, weights, batch=1, prompt_slots=16, max_tokens=1, image_patches=16
    )
    with pytest.raises(ValueError, match=r"16 patches a prompt, got \[24\]"):
        next(small.stream([text], images=[[Image.new("RGB", (24, 16))]]))
    with pytest.raises(ValueError, match="of a video, which is not read"):
        with_images(config, [5, config.video_token], [])
    with pytest.raises(ValueError, match="too slim"):
        preprocess(Image.new("RGB", (1001, 5)), config)
    with pytest.raises(ValueError, match="is empty"):
        preprocess(Image.new("RGB", (0, 5)), config)
    with pytest.raises(TypeError, match="an image of Pillow or the name of a file"):
        preprocess(np.zeros((8, 8, 3), np.uint8), config)  # pyright: ignore
    bare = dataclasses.replace(config, image_rule=None)
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        preprocess(image, bare)
    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot identify image file"):
        preprocess(tmp_path / "x.png", config)
    tiny = load(write_tiny_gguf(tmp_path / "m.gguf", "llama"), "f32")
    with pytest.raises(ValueError, match="reads text alone"):
        generate(*tiny, [[3]], images=[[image]], max_tokens=1)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        preprocess("a.png", config)
