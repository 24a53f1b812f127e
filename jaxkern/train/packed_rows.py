"""`PackedRows`: texts side by side in rows of one length, in an order that is known.

What a batch holds depends on its number and the seed alone, so a run that goes on from
a checkpoint needs no state of the data but how many batches it has read.
"""

import bisect
import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

Batch = dict[str, Int32[np.ndarray, "b t"] | Bool[np.ndarray, "b t"]]


class PackedRows:
    """Rows of tokens that `next_token_loss` takes.

    A text longer than a row is cut; the pieces, longest first, each go into the row
    with the least space that is enough for them. What stays empty is masked. Each pass
    over the rows has its own order.

    Args:
      texts: tokens of each.
      length: of a row.
      seed: of the orders; None keeps that of the rows.

    Raises:
      ValueError: no text has two tokens.

    Example:
      >>> rows = PackedRows([np.arange(5), np.arange(2)], 4, seed=None)
      >>> rows.batch(0, 2)["tokens"].tolist()  # the piece [4] has nothing to predict
      [[0, 1, 2, 3], [0, 1, 0, 0]]
    """

    def __init__(
        self,
        texts: Sequence[Int32[np.ndarray, " t"]],
        length: int,
        *,
        seed: int | None,
    ):
        pieces = [
            text[i : i + length] for text in texts for i in range(0, len(text), length)
        ]
        pieces = [piece for piece in pieces if len(piece) > 1]
        if not pieces:
            raise ValueError("data: no text has two tokens: there is nothing to learn.")
        self.length, self.seed = length, seed
        self.rows = packed(pieces, length)
        self.num_tokens = sum(map(len, pieces))
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def digest(self) -> str:
        """Of every row: the same texts, cut and packed in the same way."""
        value = self.length
        for row in self.rows:
            for piece in row:
                value = zlib.crc32(piece.astype("<i4").tobytes(), value)
            value = zlib.crc32(b"|", value)
        return f"{value:08x}"

    def batch(self, i: int, rows: int) -> Batch:
        """Batch i, of so many rows; after the last row the next pass begins."""
        return self._filled([self._row(i * rows + k) for k in range(rows)], rows)

    def whole(self, rows: int) -> list[Batch]:
        """Every row once, in batches; the last one is filled with masked rows."""
        return [
            self._filled(self.rows[i : i + rows], rows)
            for i in range(0, len(self.rows), rows)
        ]

    def _row(self, position: int) -> list[np.ndarray]:
        epoch, at = divmod(position, len(self.rows))
        if self.seed is None:
            return self.rows[at]
        if self._order[0] != epoch:
            draws = np.random.default_rng([self.seed, epoch])
            self._order = epoch, draws.permutation(len(self.rows))
        return self.rows[self._order[1][at]]

    def _filled(self, taken: Sequence[list[np.ndarray]], rows: int) -> Batch:
        tokens = np.zeros((rows, self.length), np.int32)
        segments = np.full((rows, self.length), -1, np.int32)
        for r, pieces in enumerate(taken):
            start = 0
            for s, piece in enumerate(pieces):
                tokens[r, start : start + len(piece)] = piece
                segments[r, start : start + len(piece)] = s
                start += len(piece)
        return {"tokens": tokens, "segment_ids": segments, "mask": segments >= 0}


def packed(pieces: Sequence[np.ndarray], length: int) -> list[list[np.ndarray]]:
    """Best fit of decreasing pieces."""
    rows: list[list[np.ndarray]] = []
    free: list[tuple[int, int]] = []  # (space, row), sorted
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i]), i))
    for i in order:
        size = len(pieces[i])
        at = bisect.bisect_left(free, (size, -1))
        space, row = free.pop(at) if at < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(pieces[i])
        if space - size > 1:
            bisect.insort(free, (space - size, row))
    return rows
