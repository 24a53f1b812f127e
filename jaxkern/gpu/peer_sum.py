"""The sum over GPUs of one process, through memory that each gives to the others.

    y = residual + x of rank 0 + x of rank 1 + ...

Each GPU has a mailbox. A program sends its numbers to the same place of every other
mailbox, 64 bits for each: the number, and by which turn it was sent. It then looks into
its own mailbox until all have come. So nothing is waited for but the numbers, one way
through NVLink: there is no flag behind them and no barrier. All ranks add up in the
order of ranks, so that all have the same sum to the last bit.

Two halves of a mailbox take turns. A GPU that sends for turn t + 2 has all of turn
t + 1, and those who sent it had read turn t before: nothing is left to clear.

The launches of one mailbox follow each other on every GPU in the same order, as those
of one executable do. A number that does not come within some twenty seconds is NaN.
"""

from typing import Any, NamedTuple

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.launch import Launch
from jaxkern.gpu.triton_call import POINTER, constexpr_function, jit, tl

EACH = 512  # numbers of a program
MOST = 128 * EACH  # numbers of a sum
MAX_RANKS = 8
HEAD = 1 + MOST // EACH  # words: the rank, and the last turn of each program
POLLS = 1 << 25  # of a place before it counts as lost


class Peers(NamedTuple):
    """Which GPUs sum up over an axis.

    Attributes:
      axis_name: of the mesh.
      groups: the devices along it, by their numbers in CUDA; each in one group.
    """

    axis_name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.groups[0])

    @property
    def mailbox_bytes(self) -> int:
        return 8 * (HEAD + 2 * self.ranks * MOST)


class Mailbox(NamedTuple):
    """A pointer that the launch finds: 0 is the GPU's own, k + 1 that of rank k."""

    number: int


def launch(x: Any, residual: Any, result: Any, peers: Peers) -> Launch:
    """Of `peer_sum_kernel`; its pointers are x, residual, mailboxes and the result."""
    types = [POINTER[x.dtype.name]]
    constants: dict[str, Any] = {}
    if residual is None:
        constants["residual_ptr"] = None
    else:
        types.append(POINTER[residual.dtype.name])
    types += ["*i64", ("*i64",) * peers.ranks, POINTER[result.dtype.name]]
    constants |= {"N": x.size, "RANKS": peers.ranks, "EACH": EACH, "HEAD": HEAD}
    constants |= {"POLLS": POLLS, "AHEAD": 0}
    grid = (-(-x.size // EACH),)
    return Launch(peer_sum_kernel, tuple(types), tuple(constants.items()), grid, 4, 1)


@jit
def peer_sum_kernel(
    x_ptr,
    residual_ptr,
    own_ptr,
    mailboxes,
    y_ptr,
    N: tl.constexpr,
    RANKS: tl.constexpr,
    EACH: tl.constexpr,
    HEAD: tl.constexpr,
    POLLS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    program = tl.program_id(0)
    rank = tl.load(own_ptr, volatile=True)
    turn = tl.load(own_ptr + 1 + program, volatile=True) + 1
    lane = tl.arange(0, EACH)
    at = program * EACH + lane
    x = tl.load(x_ptr + at, at < N, 0.0).to(tl.float32)
    residual = tl.zeros([EACH], tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, at < N, 0.0).to(tl.float32)
    place = HEAD + (program * 2 + turn % 2) * (RANKS * EACH) + lane
    for other in tl.static_range(RANKS):
        send(mailboxes[other] + place + rank * EACH, x, turn, other != rank)
    total = tl.zeros([EACH], tl.float32)
    for other in tl.static_range(RANKS):
        is_own = other == rank
        theirs = receive(own_ptr + place + other * EACH, turn, is_own, POLLS)
        total += tl.where(is_own, x, theirs)
    tl.debug_barrier()  # all threads have read which turn it is
    tl.store(own_ptr + 1 + program, turn)
    total += residual
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), at < N)


@jit
def send(at, x, turn, asked):
    """A number and its turn to a place of another GPU's memory."""
    tl.inline_asm_elementwise(
        """{ .reg .pred asked; .reg .b64 word; .reg .b32 turn, rest;
        setp.ne.b32 asked, $4, 0;
        mov.b64 {turn, rest}, $3;
        mov.b64 word, {$2, turn};
        @asked st.relaxed.sys.global.b64 [$1], word;
        mov.b32 $0, 0; }""",
        "=r,l,f,l,r",
        [at.to(tl.int64), x, turn, asked.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@constexpr_function
def receive_text(POLLS):
    return f"""{{ .reg .pred again, own; .reg .b64 word;
        .reg .b32 turn, sent, rest, left;
        setp.ne.b32 own, $3, 0;
        mov.b64 {{turn, rest}}, $2;
        mov.b32 $0, 0;
        mov.b32 left, {POLLS};
        @own bra HERE;
        AGAIN: ld.relaxed.sys.global.b64 word, [$1];
        mov.b64 {{$0, sent}}, word;
        sub.s32 left, left, 1;
        setp.ne.b32 again, sent, turn;
        @again setp.gt.s32 again, left, 0;
        @again bra AGAIN;
        setp.eq.b32 own, sent, turn;
        selp.b32 $0, $0, 0x7fc00000, own;
        HERE: }}"""


@jit
def receive(at, turn, is_own, POLLS: tl.constexpr):
    """The number of that turn at a place of this GPU's memory, once it has come."""
    return tl.inline_asm_elementwise(
        receive_text(POLLS),
        "=&f,l,l,r",
        [at.to(tl.int64), turn, is_own.to(tl.int32)],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
