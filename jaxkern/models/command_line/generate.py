"""`jaxkern generate`: answers to prompts."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxkern.formats.printable import printable
from jaxkern.models.command_line.demo import demo_model
from jaxkern.models.command_line.options import (
    add_cache,
    add_drafts,
    add_further_files,
    add_quiet_and_cache,
    add_sampling,
    add_weights_and_backend,
    cache_of,
    further_files_of,
    sampling_of,
)
from jaxkern.models.command_line.progress import spinner
from jaxkern.models.command_line.statistics import peak_memory, print_tables, rate
from jaxkern.models.command_line.text_stream import TextStream

LONGEST_PROMPT = 2**26  # bytes of a file of prompts
SHOWN = 60  # characters of a prompt above its answer


def add_to(commands) -> None:
    parser = commands.add_parser("generate", help="answer prompts")
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", metavar="MODEL", help="GGUF file or folder; default: SmolLM2")
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="may be given several times: they are answered at once",
    )
    add(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is one prompt; - is standard input",
    )
    add("--prompts-file", metavar="FILE", help="a prompt on each line; - likewise")
    add(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="shown before each prompt; may be given several times",
    )
    add("--system", metavar="TEXT", help="the message before the prompt")
    add("--raw", action="store_true", help="no chat template")
    add("--max-tokens", type=int, default=128, metavar="N", help="of an answer (128)")
    add_sampling(parser)
    add_weights_and_backend(parser)
    add_further_files(parser)
    add_cache(parser)
    add_drafts(parser)
    add_quiet_and_cache(parser)
    add("--json", action="store_true", help="nothing but a JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    prompts = read_prompts(options)
    if options.raw and options.system:
        raise ValueError("--system: has no place in a --raw prompt.")
    if options.raw and options.image:
        raise ValueError("--image: has no place in a --raw prompt.")
    path = Path(options.model) if options.model else demo_model()

    from jaxkern import backend
    from jaxkern.models.command_line.executables import kept_executables

    with contextlib.ExitStack() as entered:
        entered.enter_context(backend(options.backend))
        entered.enter_context(kept_executables(not options.no_cache))
        report = answer(options, path, prompts)
    if options.json:
        print(json.dumps(report))
    elif not options.quiet:
        print_tables(report)
    return 0


def read_prompts(options: argparse.Namespace) -> list[str]:
    """In the order: texts, files, lines of a file."""
    prompts = list(options.prompt)
    prompts += [text_of(name).removesuffix("\n") for name in options.prompt_file]
    if options.prompts_file is not None:
        lines = text_of(options.prompts_file).splitlines()
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(
            "generate: no prompt. Give --prompt TEXT, --prompt-file FILE or "
            "--prompts-file FILE."
        )
    for i, prompt in enumerate(prompts):
        if not prompt.strip():
            which = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else "it"
            raise ValueError(f"--prompt: has no tokens, {which} is empty. Give a text.")
    return prompts


def text_of(name: str) -> str:
    """A file's text, of standard input for "-"."""
    where = "standard input" if name == "-" else name
    with contextlib.ExitStack() as entered:
        file = sys.stdin.buffer
        if name != "-":
            file = entered.enter_context(open(name, "rb"))
        content = file.read(LONGEST_PROMPT + 1)
    if len(content) > LONGEST_PROMPT:
        raise ValueError(f"{where}: has more than {LONGEST_PROMPT} bytes of prompts.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is not UTF-8 at byte {error.start}.") from None


def answer(options: argparse.Namespace, path: Path, prompts: list[str]) -> dict:
    """Shows the answers on stdout and returns all there is to say about them."""
    from jaxkern.models.cache_kind import cache_bytes, usual_form
    from jaxkern.models.generate import NO_TOKEN, Generator
    from jaxkern.models.image_prompts import expanded
    from jaxkern.models.image_rule import preprocess
    from jaxkern.models.text_model import open_model

    cache = cache_of(options)
    with spinner(f"loading {path.name}", quiet=options.quiet) as say:
        model = open_model(path, options.weights, **further_files_of(options))
        encoded = [_encode(model.tokenizer, options, prompt) for prompt in prompts]
        pictures = [preprocess(name, model.config) for name in options.image]
        images = [pictures] * len(prompts) if pictures else None
        lengths, patches = [len(ids) for ids in encoded], 0
        if images is not None:
            shown = expanded(model.config, encoded, images)
            lengths = [len(prompt.tokens) for prompt in shown]
            patches = max(prompt.patches for prompt in shown)
        say("compiling")
        generator = Generator(
            model.config,
            model.weights,
            batch=len(prompts),
            prompt_slots=max(lengths),
            max_tokens=options.max_tokens,
            image_patches=patches,
            sampling=sampling_of(options, model.sampling),
            stop_ids=tuple(model.tokenizer.stop_ids),
            cache=cache,
            drafts=options.draft,
        )
        say(f"reading {sum(lengths)} tokens")
        streams = [TextStream(model.tokenizer) for _ in prompts]
        streamed = len(prompts) == 1 and not options.json
        for chunk in generator.stream(encoded, images=images, seed=options.seed):
            for row, stream in zip(chunk, streams, strict=True):
                piece = stream.push(int(token) for token in row if token != NO_TOKEN)
                if streamed:
                    say(None)
                    print(piece, end="", flush=True)
            if not streamed:
                say(f"{sum(len(stream.ids) for stream in streams)} tokens")
    for prompt, stream in zip(prompts, streams, strict=True):
        if not (streamed or options.json):
            head = " ".join(prompt.split())
            head = head if len(head) <= SHOWN else f"{head[: SHOWN - 3]}..."
            print(f"> {printable(head)}")
        if not options.json:
            print(stream.rest() if streamed else printable(stream.text))
    timings = generator.timings
    return {
        "answers": [
            {
                "prompt": prompt,
                "prompt_tokens": length,
                "text": stream.text,
                "token_ids": stream.ids,
            }
            for prompt, length, stream in zip(prompts, lengths, streams, strict=True)
        ],
        "model": str(path),
        "weights": model.policy,
        "weights_reason": model.reason,
        "cache": cache or usual_form(model.config),
        "draft": options.draft,
        "timings": {
            "load_seconds": model.seconds,
            "compile_seconds": generator.compile_seconds,
            "prefill_seconds": timings.prefill_seconds,
            "prefill_tokens_per_second": rate(
                timings.prefill_tokens, timings.prefill_seconds
            ),
            "decode_seconds": timings.decode_seconds,
            "decode_tokens_per_second": rate(
                timings.decode_steps * timings.tokens_a_step * len(prompts),
                timings.decode_seconds,
            ),
            "tokens_a_step": timings.tokens_a_step,
        },
        "executables": list(generator.executables),
        "memory": {
            "peak_bytes": peak_memory(),
            "file_bytes": model.nbytes,
            "cache_bytes": cache_bytes(generator.cache),
        },
        "implementations": {
            name: {row.op: row.runs for row in explanation.rows}
            for name, explanation in generator.explain().items()
        },
    }


def content(text: str, images: Sequence[str]) -> str | list[dict[str, str]]:
    """That of a message: the text, or a list of images and the text, for templates."""
    if not images:
        return text
    shown = [{"type": "image", "image": name} for name in images]
    return [*shown, {"type": "text", "text": text}]


def _encode(tokenizer, options: argparse.Namespace, prompt: str) -> list[int]:
    if options.raw:
        return tokenizer.encode(prompt)
    system = [{"role": "system", "content": options.system}] if options.system else []
    messages = [*system, {"role": "user", "content": content(prompt, options.image)}]
    return tokenizer.encode(tokenizer.chat(messages), special=True)
