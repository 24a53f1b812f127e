"""Options that several commands have, and what they mean."""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkern.models.sampling import Sampling

# option -> (field of Sampling, type, what it does)
SAMPLING: Mapping[str, tuple[str, type, str]] = {
    "temperature": ("temperature", float, "0: the likeliest token"),
    "top-k": ("top_k", int, "of so many likeliest tokens"),
    "top-p": ("top_p", float, "of the likeliest that have this share together"),
    "min-p": ("min_p", float, "of those with this share of the likeliest one's"),
    "repetition-penalty": ("repetition", float, "of tokens there; 1: none"),
    "presence-penalty": ("presence", float, "of tokens in the answer; 0: none"),
    "frequency-penalty": ("frequency", float, "for each time there; 0: none"),
}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options that default to what the model's files say."""
    group = parser.add_argument_group(
        "sampling", "default: generation_config.json of a folder, else the likeliest"
    )
    for name, (_, kind, what) in SAMPLING.items():
        metavar = "K" if kind is int else "X"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=what)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws")


def sampling_of(options: argparse.Namespace, default: "Sampling") -> "Sampling":
    """The default with what the options say."""
    given = {
        field: value
        for name, (field, _, _) in SAMPLING.items()
        if (value := getattr(options, name.replace("-", "_"))) is not None
    }
    return checked(dataclasses.replace(default, **given))


def checked(sampling: "Sampling") -> "Sampling":
    """The same, if there is such a sampling.

    Raises:
      ValueError: a value is out of its range.
    """
    ranges: dict[str, tuple[bool, str]] = {
        "temperature": (sampling.temperature >= 0, "at least 0"),
        "top-p": (0 <= (sampling.top_p or 0) <= 1, "between 0 and 1"),
        "min-p": (0 <= (sampling.min_p or 0) <= 1, "between 0 and 1"),
        "repetition-penalty": (0 < sampling.repetition < 1e6, "above 0"),
        "presence-penalty": (abs(sampling.presence) < 1e6, "finite"),
        "frequency-penalty": (abs(sampling.frequency) < 1e6, "finite"),
    }
    for name, (fine, expected) in ranges.items():
        if not fine:
            value = getattr(sampling, SAMPLING[name][0])
            raise ValueError(f"--{name} must be {expected}, got {value}.")
    return sampling


def set_one(sampling: "Sampling", name: str, text: str) -> "Sampling":
    """The sampling with one option of another value, given as text."""
    field, kind, _ = SAMPLING[name]
    try:
        value: Any = None if text == "none" and name in CUTS else kind(text)
    except ValueError:
        raise ValueError(f"--{name} must be a number, got {text!r}.") from None
    return checked(dataclasses.replace(sampling, **{field: value}))


CUTS = ("top-k", "top-p", "min-p")


def add_weights_and_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        default="auto",
        metavar="POLICY",
        help="auto, packed (blocks of the file), packed_int8 (also activations of 8 "
        "bits), f32 or bf16 (decoded while loading), fp8_experts (bf16, and experts of "
        "8-bit floats), affine (blocks in MLX's format)",
    )
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help="implementation of every op: auto, xla, triton, mosaic_gpu, cpp or mps",
    )


def add_further_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_tower(parser)
    add("--adapter", metavar="FOLDER", help="LoRA of PEFT or of jaxkern finetune")
    add("--merge", action="store_true", help="add the adapter to the weights")


def add_tower(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tower",
        metavar="FILE",
        help="with this mmproj-*.gguf a GGUF file reads images",
    )


def further_files_of(options: argparse.Namespace) -> dict[str, Any]:
    """What `open_model` takes of them."""
    if options.merge and options.adapter is None:
        raise ValueError("--merge: there is no --adapter to add.")
    return dict(tower=options.tower, adapter=options.adapter, merge=options.merge)


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        metavar="KIND",
        help="of keys and values: f32, f16, bf16, int8, int4, turboquant4 ... ; "
        "default f32, on a GPU the activations' dtype",
    )


def add_drafts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        type=int,
        default=0,
        metavar="N",
        help="read N tokens that the text suggests with each drawn one, up to 7: the "
        "same answer in fewer steps where it repeats the text",
    )


def cache_of(options: argparse.Namespace) -> str | None:
    """The kind that --cache names, known before anything is loaded; None: default."""
    from jaxkern.models.cache_kind import cache_form

    if options.cache is not None:
        cache_form(options.cache)
    return options.cache


def add_quiet_and_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="the answer alone")
    parser.add_argument(
        "--no-cache", action="store_true", help="keep no executables on disk"
    )
