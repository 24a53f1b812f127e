"""What each kind of cache costs a model, in bytes and in certainty of the next token.

    python -m benchmarks cache_kinds [--model FILE] [--text FILE] [--kinds int8,int4]

The model reads the text once with each kind, with exact activations. Of its next tokens
the table has the perplexity, KL(p || q) in nats from the float32 cache's p, the mean
distance of a logit from its own, and how often both take the same token. A Markdown
table on stdout.
"""

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxkern.models.architecture import page_of
from jaxkern.models.cache_kind import cache_bytes, new_cache
from jaxkern.models.command_line import demo_model
from jaxkern.models.text_model import open_model

KINDS = "f32,f16,bf16,int8,float8,turboquant8,int4,turboquant4,turboquant3"
EXACT = "f32"
TEXT = """\
The lighthouse keeper had not spoken to anyone for eleven days when the boat came in.
She heard the engine before she saw it, a low cough somewhere behind the fog, and she
put down the brush and the tin of white paint and walked to the edge of the landing. The
boat was small and green, with a cabin no wider than a wardrobe, and the man at the
wheel was not the one who usually brought the post. He threw her a rope without a word.
She tied it to the iron ring, twice round and once under, as her father had taught her.

"You are late," she said. It was the first sentence that came to her, and it sounded odd
in her own ears, as if someone else had used her voice while she was not looking.

"I am not late," said the man. "I am not the post. The post is on Thursday. I have come
to measure the rock." He lifted a wooden box onto the stones, then a second one, then
three legs of brass that folded out into a stand. On the side of each box somebody had
written a number in chalk, and under the number the word FRAGILE, spelled wrongly.

She asked him why a rock that had been there since before the first ship should need to
be measured now. He explained that the ministry had two maps of the coast, one made in
spring and one made in autumn, and that the island was forty metres further east on the
second than on the first. Either one of the surveyors had been careless, or the island
had moved. The ministry did not believe that islands move. But it had paid for both
maps, and it wished to know which of them it ought to throw away.

They carried the boxes up the path together. There were two hundred and six steps, and
at every fiftieth there was a bench, because the man who cut them had been old. From the
third bench one could see the whole of the island: the tower, the house, the garden with
its wall against the wind, and the four sheep, who were standing in a row and watching.
"""


class Cost(NamedTuple):
    """Of one kind; all but the first two are means over the tokens of the text."""

    kind: str
    token_bytes: int
    surprise: float  # -log p of the token that came, in nats
    divergence: float
    distance: float  # |logit - exact logit|
    agree: float


@functools.partial(jax.jit, static_argnums=(0, 3))
def next_logits(
    config: Any, weights: Any, tokens: Int32[Array, "1 t"], kind: str
) -> Float[Array, "t v"]:
    """Of the token that follows each, read from a cache of this kind."""
    page = page_of(config)
    cache = new_cache(config, 1, tokens.shape[1], kind)
    x, _ = page.hidden_states(config, weights, tokens, cache)
    return page.logits(config, weights, x)[0]


@jax.jit
def means(
    logits: Float[Array, "t v"], exact: Float[Array, "t v"], tokens: Int32[Array, " t"]
) -> Float[Array, " 4"]:
    """The last four of `Cost`."""
    q, p = jax.nn.log_softmax(logits), jax.nn.log_softmax(exact)
    came = jnp.take_along_axis(q[:-1], tokens[1:, None], axis=-1)
    same = jnp.argmax(logits, -1) == jnp.argmax(exact, -1)
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    distance = jnp.abs(logits - exact)
    return jnp.stack([-came.mean(), kl.mean(), distance.mean(), same.mean()])


def costs(config: Any, weights: Any, ids: list[int], kinds: list[str]) -> list[Cost]:
    tokens = np.array(ids, np.int32)
    exact = next_logits(config, weights, tokens[None], EXACT)
    found = []
    for kind in kinds:
        logits = next_logits(config, weights, tokens[None], kind)
        others = map(float, means(logits, exact, tokens))
        found.append(Cost(kind, token_bytes(config, kind), *others))
    return found


def token_bytes(config: Any, kind: str) -> int:
    """By which a cache grows with each slot."""

    def whole(slots: int) -> int:
        return cache_bytes(jax.eval_shape(lambda: new_cache(config, 1, slots, kind)))

    return whole(2) - whole(1)


def table(rows: list[Cost]) -> str:
    lines = [
        "| cache | bytes a token | perplexity | KL | mean distance | same token |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.kind} | {c.token_bytes:,} | {np.exp(c.surprise):.3f} | "
        f"{c.divergence:.2g} | {c.distance:.2g} | {100 * c.agree:.1f} % |"
        for c in rows
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("benchmarks cache_kinds", description=__doc__)
    parser.add_argument("--model", help="file or folder; default: SmolLM2")
    parser.add_argument("--text", type=Path, help="default: the start of a story")
    parser.add_argument("--kinds", default=KINDS, help="by commas")
    options = parser.parse_args(arguments)
    model = open_model(options.model or demo_model(), "packed")
    text = TEXT if options.text is None else options.text.read_text()
    ids = model.tokenizer.encode(text)
    rows = costs(model.config, model.weights, ids, options.kinds.split(","))
    print(f"{len(ids)} tokens, head dim {getattr(model.config, 'head_dim', '?')}")
    print(table(rows))
    return 0
