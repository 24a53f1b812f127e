"""The text of an answer, piece by piece, as its tokens come."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxkern.formats.printable import printable

if TYPE_CHECKING:
    from jaxkern.models.tokenizer import GGUFTokenizer


class TextStream:
    """Decodes the ids of one answer; `text` is all of it so far, `ids` its tokens."""

    def __init__(self, tokenizer: "GGUFTokenizer"):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.text, self._shown = "", 0

    def push(self, ids: Iterable[int]) -> str:
        """What these tokens add, fit for a terminal; a half character waits."""
        self.ids += ids
        self.text = self.tokenizer.decode(self.ids)
        if self.text.endswith("\ufffd"):
            return ""
        return self.rest()

    def rest(self) -> str:
        """What has not been shown, broken characters included."""
        new, self._shown = self.text[self._shown :], len(self.text)
        return printable(new)
