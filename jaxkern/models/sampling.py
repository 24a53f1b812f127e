"""How the next token is drawn, and what penalties have to know of those before."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from jaxkern import (
    apply_frequency_penalty,
    apply_repetition_penalty,
    argmax,
    sample,
)
from jaxkern.primitives.sampling.sample import sample_at


class Seen(NamedTuple):
    """Tokens of a sequence: which the prompt has, how often each is in the answer."""

    prompt: Bool[Array, "b v"]
    answer: Int32[Array, "b v"]

    @classmethod
    def of_prompts(
        cls, tokens: Int32[Array, "b t"], lengths: Int32[Array, " b"], vocabulary: int
    ) -> "Seen":
        nothing = jnp.zeros((tokens.shape[0], vocabulary), jnp.int32)
        return cls(nothing > 0, nothing).with_prompt(tokens, lengths)

    def with_prompt(
        self, tokens: Int32[Array, "b t"], lengths: Int32[Array, " b"]
    ) -> "Seen":
        """After one more prompt, of which `lengths` tokens count; no answer yet."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        there = jnp.arange(tokens.shape[1]) < lengths[:, None]
        places = jnp.where(
            there, tokens, self.prompt.shape[1]
        )  # dropped behind the end
        before = self.prompt | (self.answer > 0)
        prompt = before.at[rows, places].set(True, mode="drop")
        return Seen(prompt, jnp.zeros_like(self.answer))

    def after(
        self, tokens: Int32[Array, " b"], times: Int32[Array, "*b"] | int = 1
    ) -> "Seen":
        """With one token more of each answer, or `times` so many."""
        rows = jnp.arange(tokens.shape[0])
        return self._replace(answer=self.answer.at[rows, tokens].add(times))


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; see `jaxkern.sample`. Temperature 0 takes the likeliest.

    The penalties come before: `repetition` on the tokens of prompt and answer, 1 for
    none, `presence` and `frequency` on those of the answer, 0 for none: a prompt is
    full of the tokens that end an answer, which each would make less likely.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether a draw depends on the tokens before."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def is_likeliest(self) -> bool:
        """Whether a draw depends on the logits alone."""
        return self.temperature <= 0 and not self.counts

    @staticmethod
    def likeliest(logits: Float[Array, "b v"]) -> Int32[Array, " b"]:
        """The draw where it is: what `sample` does without a temperature."""
        return argmax(logits, nan_policy="ignore")

    def __call__(
        self, logits: Float[Array, "b v"], key: jax.Array, seen: Seen | None = None
    ) -> Int32[Array, " b"]:
        """One key draws for all rows, or each of `[b]` for its own."""
        if seen is not None:
            logits = self.penalised(logits, seen)
        draw = functools.partial(
            sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )
        if key.ndim == 0:
            return draw(logits, key)
        return jax.vmap(lambda row, own: draw(row[None], own)[0])(logits, key)

    def by_row(
        self,
        logits: Float[Array, "b v"],
        keys: PRNGKeyArray,
        seen: Seen | None = None,
    ) -> tuple[Int32[Array, " b"], PRNGKeyArray]:
        """What a loop of `__call__` draws whose rows are not equally far.

        Args:
          logits, seen: as there.
          keys: `[b]`, for each row that of the loop at its draw. The loop splits it
            into the key of the next draw and that of this one, for b rows.

        Returns:
          tokens: of which each is what the loop has in its row.
          keys: of the next draw of each row.
        """
        if seen is not None:
            logits = self.penalised(logits, seen)
        if self.temperature <= 0:
            return self.likeliest(logits), keys
        b = len(keys)
        keys, now = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        of_all = jax.vmap(lambda key: jax.random.uniform(key, (b,), jnp.float32))
        uniform = jnp.diagonal(of_all(now))
        cuts = self.top_k, self.top_p, self.min_p
        return sample_at(logits, uniform, self.temperature, *cuts), keys

    def penalised(self, logits: Float[Array, "b v"], seen: Seen) -> Float[Array, "b v"]:
        ids = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
        there = seen.prompt | (seen.answer > 0)
        return apply_frequency_penalty(
            apply_repetition_penalty(logits, ids, self.repetition, mask=there),
            seen.answer,
            frequency=self.frequency,
            presence=self.presence,
        )


LIKELIEST = Sampling()
