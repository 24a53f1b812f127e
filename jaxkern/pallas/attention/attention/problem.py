"""What shapes and options fix of the forward pass of attention on Hopper."""

import dataclasses

from jaxkern.gpu.device import num_sms
from jaxkern.pallas.attention.attention.pairs import LOG2_E, pair_bytes

ROWS = 64  # queries of a consumer: those of one WGMMA
WIDTH = 256  # head dims that registers hold of the results of 64 queries
SHORT = 8192  # keys in reach, up to which a causal tile has few blocks
SHARED_BYTES = 232_448 - 3072  # of a program; the rest is for barriers
LINE = 128  # bytes of a tile's row as it is swizzled
LSE_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Problem:
    """What shapes and options fix.

    Attributes:
      b, t, s, n, group: sizes; `group` query heads share a key head.
      h, pieces: the head dim of queries and keys, and in how many pieces they lie.
      hv, parts: dims of the values that a program takes, and how many programs do.
      scale: of q k^T, with log2 e where no cap comes after it.
      folded: the scale is applied as late as in the exponent; nothing is added.
      softcap, causal, window: options.
      consumers: warpgroups of `ROWS` queries.
      block_k: keys of a block.
      stages: blocks of keys, and of values, in shared memory.
      overlap: the softmax does not wait for the product that was issued before it.
      turns: the consumers issue their products in turns.
      early: keys whose weights are computed before the maximum is known, if `lazy`.
      late: keys whose weights are computed when the product under way is there.
      lazy: sums keep their scale until a maximum has grown by much.
      copied_bias: the bias comes through shared memory.
      out_in_query: results are staged where the queries lay, for want of space.
      staged_lse: lse is staged at all.
      programs: of the grid.
    """

    b: int
    t: int
    s: int
    n: int
    group: int
    h: int
    pieces: int
    hv: int
    parts: int
    scale: float
    folded: bool
    softcap: float | None
    causal: bool
    window: int | None
    consumers: int
    block_k: int
    stages: int
    overlap: bool
    turns: bool
    early: int
    late: int
    lazy: bool
    copied_bias: bool
    out_in_query: bool
    staged_lse: bool
    programs: int

    @property
    def block_q(self) -> int:
        return self.consumers * ROWS

    @property
    def blocks(self) -> int:
        return -(-self.t // self.block_q)

    @property
    def tiles(self) -> int:
        return self.blocks * self.b * self.n * self.parts


def sizes(h: int, hv: int, reach: int, causal: bool) -> dict[str, int]:
    """By head dims, keys that a query reaches, and mask; measured sizes go over them.

    A program takes several tiles, so that it loads the next one while it ends the last.
    Long tiles of wide heads are best given to the multiprocessors by the hardware. With
    narrow heads exponentials decide, of which three consumers keep more in flight, with
    registers for the guessed weights of 32 keys.
    """
    width = max(h, hv)
    found = dict(CONSUMERS=2, BLOCK_K=128, STAGES=2, EARLY=64, LATE=64, LAZY=1)
    found |= dict(OVERLAP=1, TURNS=1, PERSISTENT=1)
    if width <= 64:
        found["STAGES"] = 4
        if not causal or reach >= SHORT // 2:
            found |= dict(CONSUMERS=3, TURNS=0, EARLY=32)
    elif width < 128:
        found["TURNS"] = 0
    elif width > 128:
        found |= dict(TURNS=int(causal), PERSISTENT=int(not causal))
        if width <= WIDTH:
            found |= dict(BLOCK_K=64, EARLY=32, LATE=16)
        else:
            found |= dict(BLOCK_K=32, EARLY=32, LATE=0, LAZY=0)
    return found


def memory(
    h: int,
    hv: int,
    bias_bytes: int,
    CONSUMERS: int,
    BLOCK_K: int,
    STAGES: int,
    **_: int,
) -> dict[str, bool] | None:
    """What shared memory has room for, as `Problem` names it; None if for too little.

    `bias_bytes`: of the bias of a pair, 0 where not every pair has one.
    """
    block_q, lanes = CONSUMERS * ROWS, STAGES * BLOCK_K
    pieces, parts = in_pieces(h), in_pieces(hv)
    part = hv // parts
    held = 2 * (block_q * h + lanes * (h + part))
    lines = bias_bytes > 0 and BLOCK_K * bias_bytes % LINE == 0
    for copied, out_in_query in (
        (lines, False),
        (lines, True),
        (False, False),
        (False, True),
    ):
        used = held + copied * lanes * block_q * bias_bytes
        used += 0 if out_in_query else 2 * block_q * part
        fits = used <= SHARED_BYTES
        if fits and not (out_in_query and h // pieces != part):
            staged_lse = used + LSE_BYTES <= SHARED_BYTES
            return dict(
                copied_bias=copied,
                out_in_query=out_in_query,
                staged_lse=staged_lse,
            )
    return None


def in_pieces(dim: int) -> int:
    return -(-dim // WIDTH)


TRIED: dict[str, int] = {}  # what a benchmark or a test tries in the rule's place


def problem(query, key, value, bias, scale, causal, window, softcap) -> Problem:
    """Shapes, options and sizes of a launch; the sizes are those of the rule."""
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    parts = in_pieces(hv)
    bias_bytes = pair_bytes(bias)
    rule = sizes(h, hv, min(s, window or s), causal)
    if bias_bytes > 0:  # room for its blocks
        rule["STAGES"] = 2
    if bias_bytes > 2:
        rule["BLOCK_K"] = min(rule["BLOCK_K"], 64)
    found = rule | TRIED
    room = memory(h, hv, bias_bytes, **found)
    assert room is not None  # `unsupported` says so
    early = min(found["EARLY"], found["BLOCK_K"])
    c = Problem(
        b=b,
        t=t,
        s=s,
        n=n,
        group=n // heads,
        h=h,
        pieces=in_pieces(h),
        hv=hv // parts,
        parts=parts,
        scale=scale * (LOG2_E if softcap is None else 1.0),
        folded=softcap is None and bias is None and scale > 0,
        softcap=softcap,
        causal=causal,
        # no position is as far as 2^30, and more could overflow
        window=None if window is None else min(window, 2**30),
        consumers=found["CONSUMERS"],
        block_k=found["BLOCK_K"],
        stages=found["STAGES"],
        overlap=bool(found["OVERLAP"]),
        turns=bool(found["TURNS"]),
        early=early,
        late=min(found["LATE"], found["BLOCK_K"] - early),
        lazy=bool(found["LAZY"]),
        **room,
        programs=0,
    )
    programs = min(c.tiles, num_sms()) if found["PERSISTENT"] else c.tiles
    return dataclasses.replace(c, programs=programs)
