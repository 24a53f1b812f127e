"""How an image becomes patches: the rule of a folder, and `preprocess` by Pillow.

preprocessor_config.json    sizes, mean and deviation, as transformers reads them
processor_config.json       the same as `image_processor`, in newer folders

An image is made RGB, resized so that both sides are multiples of patch * merge and the
number of pixels is within bounds, normalised, and cut into patches in the order in
which `vision_tower` merges them.
"""

import json
import math
import os
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from jaxkern.formats.safetensors import LONGEST_JSON, SafetensorsError
from jaxkern.models.vision_tower import VisionConfig

if TYPE_CHECKING:
    from PIL.Image import Image

FILES = ("preprocessor_config.json", "processor_config.json")
SLIMMEST = 200  # times as long as wide, and no more
BYTE = 1 / 255
HARMLESS = (  # who wrote the file, what it is called, and what the names below say
    *("image_processor_type", "processor_class", "feature_extractor_type"),
    *(
        "return_tensors",
        "data_format",
        "input_data_format",
        "device",
        "default_to_square",
    ),
    *("disable_grouping", "auto_map", "model_input_names"),
)
MUST = {  # a step that is left out makes other pixels
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
}


@dataclass(frozen=True)
class ImageRule:
    """What a folder says of its images.

    Attributes:
      least, most: pixels of a resized image.
      mean, deviation: of red, green and blue, of pixels in [0, 1].
      factor: from bytes to these.
      resample: Pillow's number of a filter; 3 is bicubic.
    """

    least: int
    most: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    factor: float = BYTE
    resample: int = 3


class Picture(NamedTuple):
    """An image in patches.

    Attributes:
      numbers: `[n, numbers]`, patches in blocks of merge x merge, row by row.
      place: `[n, 2]`, row and column of each patch.
      rows, columns: of patches.
    """

    numbers: Float32[np.ndarray, "n numbers"]
    place: Int32[np.ndarray, "n 2"]
    rows: int
    columns: int


def preprocess(image: "Image | str | PathLike[str]", config: Any) -> Picture:
    """An image as the model reads it.

    Args:
      image: of Pillow, in any mode; or the name of a file, which is turned upright as
        its EXIF data say.
      config: of a model that reads images.

    Returns:
      A `Picture` of rows * columns patches, both multiples of the tower's merge.

    Raises:
      ValueError: the model reads no images, its folder does not say how, the file is
        none, or the image is empty or too slim.
      ImportError: there is no Pillow.

    Example:
      >>> from types import SimpleNamespace
      >>> from jaxkern.models.vision_tower import VisionConfig
      >>> vision = VisionConfig(1, 8, 1, 8, 4, 2, 3, 2, side=2, deep=(), d_text=8)
      >>> rule = ImageRule(64, 256, (0.5,) * 3, (0.5,) * 3)
      >>> config = SimpleNamespace(vision=vision, image_rule=rule)
      >>> from PIL import Image
      >>> picture = preprocess(Image.new("L", (20, 9), 255), config)
      >>> picture.rows, picture.columns, picture.numbers.shape
      (2, 4, (8, 96))
    """
    vision, rule = vision_of(config), config.image_rule
    if rule is None:
        raise ValueError(
            f"preprocess: the folder has no {FILES[0]}, which says how its images are "
            "made. Add that file of the model."
        )
    pixels = rgb(image)
    height, width, _ = pixels.shape
    height, width = size_of(height, width, vision.patch * vision.merge, rule)
    from PIL import Image

    resized = Image.fromarray(pixels).resize((width, height), resample=rule.resample)
    x = (np.asarray(resized).astype(np.float64) * rule.factor).astype(np.float32)
    x = (x - np.float32(rule.mean)) / np.float32(rule.deviation)
    rows, columns = height // vision.patch, width // vision.patch
    place = np.moveaxis(np.indices((rows, columns), np.int32), 0, -1)
    cut = x.reshape(rows, vision.patch, columns, vision.patch, -1)
    cut = cut.transpose(0, 2, 4, 1, 3)  # [rows, columns, channels, patch, patch]
    frames = np.repeat(cut[:, :, :, None], vision.frames, axis=3)

    def in_blocks(a: np.ndarray) -> np.ndarray:
        m = vision.merge
        a = a.reshape(rows // m, m, columns // m, m, -1).swapaxes(1, 2)
        return np.ascontiguousarray(a.reshape(rows * columns, -1))

    return Picture(in_blocks(frames), in_blocks(place), rows, columns)


def vision_of(config: Any) -> VisionConfig:
    """The tower of a model that has one."""
    vision = getattr(config, "vision", None)
    if vision is None:
        raise ValueError(
            f"images: the model of architecture {config.architecture} reads text "
            "alone. Load one that reads images, such as Qwen3-VL; of GGUF files with "
            "its tower."
        )
    return vision


def rgb(image: "Image | str | PathLike[str]") -> UInt8[np.ndarray, "height width 3"]:
    """Red, green and blue; what is transparent lies on white."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ImportError("images: Pillow reads them: pip install pillow") from None
    if isinstance(image, str | PathLike):
        try:
            with Image.open(fspath(image)) as opened:
                image = ImageOps.exif_transpose(opened)
                image.load()
        except (UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ValueError(f"images: {error}.") from None
    if not isinstance(image, Image.Image):
        raise TypeError(
            "images: expected an image of Pillow or the name of a file, got "
            f"{type(image).__name__}."
        )
    if not min(image.size):
        raise ValueError(f"images: an image of {image.size} pixels is empty.")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def size_of(height: int, width: int, step: int, rule: ImageRule) -> tuple[int, int]:
    """The sides to which an image is resized: multiples of `step` near its own.

    Their product is within the rule's bounds, and their ratio nearly the image's.
    """
    if max(height, width) > SLIMMEST * min(height, width):
        raise ValueError(
            f"images: an image of {width} x {height} pixels is too slim, one side may "
            f"be up to {SLIMMEST} times the other."
        )
    sides = (height, width)
    new = [round(side / step) * step for side in sides]
    if math.prod(new) > rule.most:
        shrink = math.sqrt(height * width / rule.most)
        new = [max(step, math.floor(side / shrink / step) * step) for side in sides]
    elif math.prod(new) < rule.least:
        grow = math.sqrt(rule.least / (height * width))
        new = [math.ceil(side * grow / step) * step for side in sides]
    return new[0], new[1]


def rule_of_folder(path: str, vision: VisionConfig) -> ImageRule | None:
    """What the folder's file says, None where there is none.

    Raises:
      SafetensorsError: the file is damaged, contradicts config.json or has a key that
        is not understood.
    """
    for name in FILES:
        place = os.path.join(path, name)
        if not os.path.isfile(place):
            continue
        if (size := os.path.getsize(place)) > LONGEST_JSON:
            raise SafetensorsError(
                f"{path}: {name} has {size} bytes, expected at most {LONGEST_JSON}."
            )
        try:
            with open(place, encoding="utf-8") as file:
                said = json.load(file)
        except (ValueError, RecursionError) as error:
            raise SafetensorsError(f"{path}: {name} is not JSON: {error}.") from None
        if name == FILES[1] and isinstance(said, dict):
            if "image_processor" not in said:
                continue
            said = said["image_processor"]
        if not isinstance(said, dict):
            raise SafetensorsError(f"{path}: {name} is not a JSON object.")
        return rule_of(said, vision, f"{path}: {name}")
    return None


def rule_of(said: dict[str, Any], vision: VisionConfig, where: str) -> ImageRule:
    """The rule of an image processor of Qwen's kind, every key of it understood."""
    left = {key: value for key, value in said.items() if value is not None}

    def refused(key: str, value: Any, expected: str) -> SafetensorsError:
        return SafetensorsError(
            f"{where}: key {key} is {value!r}, expected {expected}."
        )

    def taken(key: str, kinds: Any, expected: str, default: Any) -> Any:
        value = left.pop(key, default)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise refused(key, value, expected)
        return value

    for key, value in MUST.items():
        if (found := left.pop(key, value)) is not value:
            raise refused(key, found, str(value).lower())
    tower = {
        "patch_size": vision.patch,
        "temporal_patch_size": vision.frames,
        "merge_size": vision.merge,
    }
    for key, value in tower.items():
        found = taken(key, int, "an integer", None)
        if found != value:
            raise refused(key, found, f"{value}, as config.json says")
    size = taken("size", dict, "shortest_edge and longest_edge", {})
    if not {*size} <= {"shortest_edge", "longest_edge"}:
        raise refused("size", size, "shortest_edge and longest_edge, in pixels")
    least = taken("min_pixels", int, "an integer", size.get("shortest_edge"))
    most = taken("max_pixels", int, "an integer", size.get("longest_edge"))
    if not 0 < least <= most:
        raise refused("size", size, "shortest_edge up to longest_edge, in pixels")

    def colours(key: str, positive: bool) -> tuple[float, ...]:
        found = taken(key, list, "three numbers", None)
        good = len(found) == 3 and all(
            isinstance(x, int | float) and math.isfinite(x) for x in found
        )
        if not good or (positive and min(found) <= 0):
            raise refused(key, found, "three numbers, of a deviation positive ones")
        return tuple(float(x) for x in found)

    rule = ImageRule(
        least,
        most,
        colours("image_mean", False),
        colours("image_std", True),
        float(taken("rescale_factor", int | float, "a number", BYTE)),
        taken("resample", int, "0 to 5", 3),
    )
    if not rule.factor > 0 or rule.resample not in range(6):
        raise refused(
            "resample", rule.resample, "0 to 5, and a positive rescale_factor"
        )
    strangers = [key for key in left if key not in HARMLESS]
    if strangers:
        raise SafetensorsError(
            f"{where}: key {strangers[0]} is {left[strangers[0]]!r}, which is not "
            "understood here. Without it other pixels would be computed."
        )
    return rule
