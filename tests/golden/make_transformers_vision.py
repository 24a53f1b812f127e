"""Tiny random models that see, as `transformers` saves them, and what it computes.

    pip install torch transformers pillow
    python -m tests.golden.make_transformers_vision

writes a folder for each model under `tests/golden/transformers_vision/`, its weights in
bfloat16, with `golden.npz` of text alone, as `make_transformers_hybrids` has it, and
`images.npz`, all in float32 from the weights as saved:

    image0, image1   [height, width, channels] uint8, one of them with transparency
    pixels           [n, numbers] of both by the image processor, and their grids [2, 3]
    features, deep   [f, d] and [levels, f, d] of both by the vision tower
    prompt           [t0] int32 with one placeholder for each image
    tokens           [t] int32, the placeholders as many as features
    positions        [3, t] int32
    logits           [t, vocabulary]
    greedy           [32] int32, the likeliest tokens behind `tokens`
    *_grad           of the mean cross entropy of the tokens that are no placeholders
    sizes            [k, 4]: height and width of an image, and to what it is resized
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from tests.golden.make_transformers_hybrids import computed, randomise

FOLDERS = Path(__file__).parent / "transformers_vision"
IMAGE, VIDEO, START, END = 92, 93, 94, 95
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
    "initializer_range": 0.3,
}
MODELS = {
    "qwen3_vl": ("qwen3_vl", TEXT),
    "qwen3_vl_moe": ("qwen3_vl_moe", TEXT | EXPERTS | {"mlp_only_layers": [1]}),
}
PROCESSOR = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
PIXELS = {"shortest_edge": 256, "longest_edge": 1024}  # which count pixels
SEED = 3  # whose answers have no placeholder
SIZES = ((1, 1), (31, 33), (48, 80), (1080, 1920), (16, 16), (720, 25), (9000, 9001))


def images(seed: int) -> list[np.ndarray]:
    """One that is larger than allowed, one that is smaller and partly transparent."""
    rng = np.random.default_rng(seed)
    large = rng.integers(0, 256, (30, 47, 3), np.uint8)
    small = rng.integers(0, 256, (9, 21, 4), np.uint8)
    return [large, small]


def seen(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """What the model of the folder says of a text with two images, in float32."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    shown = images(seed)
    inputs = processor([Image.fromarray(image) for image in shown], return_tensors="pt")
    pixels, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    rng = np.random.default_rng(seed + 1)
    words = [rng.integers(3, IMAGE, n) for n in (4, 3, 6)]
    prompt = [*words[0], START, IMAGE, END, *words[1], START, IMAGE, END, *words[2]]
    counts = iter((grids.prod(-1) // 4).tolist())
    tokens = []
    for token in prompt:
        tokens += [token] * (next(counts) if token == IMAGE else 1)
    row = torch.tensor(np.array(tokens))[None]
    more = {"pixel_values": pixels, "image_grid_thw": grids}
    own = {"mm_token_type_ids": (row == IMAGE).int()}
    tower = model.model.get_image_features(pixels, grids, return_dict=True)
    positions, _ = model.model.get_rope_index(row, image_grid_thw=grids, **own)
    logits = model(row, **own, **more).logits[0]
    counted = row[0, 1:] != IMAGE
    loss = torch.nn.functional.cross_entropy(logits[:-1][counted], row[0, 1:][counted])
    visual = model.model.visual
    learnt = {
        "embedding_grad": model.get_input_embeddings().weight,
        "patch_grad": visual.patch_embed.proj.weight,
        "place_grad": visual.pos_embed.weight,
        "deep_grad": visual.deepstack_merger_list[1].linear_fc2.bias,
    }
    grads = torch.autograd.grad(loss, [*learnt.values()])
    greedy: list[int] = []
    with torch.no_grad():
        for _ in range(32):  # by the whole text: no cache to be trusted
            text = torch.cat([row, torch.tensor([greedy]).long()], dim=1)
            kinds = (text == IMAGE).int()
            model.model.rope_deltas = None
            best = model(text, mm_token_type_ids=kinds, **more).logits[0, -1]
            best = best.topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "too close to call"
            assert best.indices[0] < IMAGE, "an answer without images"
            greedy.append(int(best.indices[0]))
    assert len({*greedy}) > 9, "always the same tokens"
    return {
        **{f"image{i}": image for i, image in enumerate(shown)},
        "pixels": pixels.numpy(),
        "grids": grids.numpy().astype(np.int32),
        "features": torch.cat(tower.pooler_output).detach().numpy(),
        "deep": np.stack(
            [torch.cat(level).detach().numpy() for level in tower.deepstack_features]
        ),
        "prompt": np.array(prompt, np.int32),
        "tokens": np.array(tokens, np.int32),
        "positions": positions[:, 0].numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "greedy": np.array(greedy, np.int32),
        **{name: g.numpy() for name, g in zip(learnt, grads, strict=True)},
        "sizes": np.array(
            [(h, w, *smart_resize(h, w, 32, 65536, 16777216)) for h, w in SIZES]
        ),
    }


def main(names: list[str]) -> None:
    for name, (kind, text) in MODELS.items():
        if names and name not in names:
            continue
        torch.manual_seed(SEED)
        config = AutoConfig.for_model(
            kind,
            text_config=text,
            vision_config=VISION,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=False,
        )
        model = AutoModelForImageTextToText.from_config(config)
        randomise(model)
        folder = FOLDERS / name
        shutil.rmtree(folder, ignore_errors=True)
        model.to(torch.bfloat16).save_pretrained(folder)
        Qwen2VLImageProcessorPil(size=PIXELS, **PROCESSOR).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(SEED).integers(3, IMAGE, 40)
        np.savez_compressed(folder / "golden.npz", **computed(folder, tokens))
        arrays = seen(folder, SEED)
        np.savez_compressed(folder / "images.npz", **arrays)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        print(name, sizes, arrays["logits"].std(), arrays["greedy"][:12])


if __name__ == "__main__":
    main(sys.argv[1:])
