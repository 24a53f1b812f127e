"""The sum over GPUs of one process, through memory that each gives to the others.

    y = residual + x of rank 0 + x of rank 1 + ...

Each GPU has a mailbox. All ranks send their numbers to the same place of every mailbox,
64 bits for each: the number, and in which turn it was sent. A kernel looks into its own
mailbox until all have come. So nothing is waited for but the numbers, one way through
NVLink: there is no flag behind them and no barrier. All ranks add up in the order of
ranks, so that all have the same sum to the last bit.

A product whose result is summed up sends it itself, row by row, while other programs
still read weights (`send`; `in_turn` says which products can). Where x is of another
kernel the sum sends it.

The turn is how many sums there were before: those of earlier chains, which the mailbox
counts and the last sum of a chain adds to, and those of this chain, known when it is
made. So a kernel knows its turn before those ahead of it have ended.

Two halves of a mailbox take turns. A GPU that sends for turn t + 2 has all of turn
t + 1, and those who sent it had read turn t before: nothing is left to clear.

The launches of one mailbox follow each other on every GPU in the same order, as those
of one executable do. A number that does not come within some twenty seconds is NaN. The
GPUs are for one process: where several take turns, a kernel looks in vain until the
other GPUs run its process too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.launch import Launch
from jaxkern.gpu.triton_call import POINTER, constexpr_function, jit, tl

EACH = 128  # numbers of a program, one of each thread: it looks for all at once
MOST = 1 << 16  # numbers of a sum
MAX_RANKS = 8
# words of a mailbox: whose it is, turns before this chain, and how many programs of its
# last sum are done; the numbers begin behind HEAD words
RANK, TURNS, DONE, HEAD = 0, 1, 2, 16
NUMBERED = 16  # bytes of a mailbox by which a pointer says one sum more of its chain
POLLS = 1 << 25  # of a place before it counts as lost

Source = tuple[bool, int, int]
"""Whether a chain's result, which (-1 - i is mailbox i), and bytes into it."""


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

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """What kernels have as a constant of that name."""
        return self.ranks, HEAD, MOST, NUMBERED


class Mailbox(NamedTuple):
    """A pointer that the launch finds: 0 is the GPU's own, k + 1 that of rank k."""

    number: int


def mailboxes(peers: Peers) -> list[Mailbox]:
    """Those that a sum is given, in the order of its pointers."""
    return [Mailbox(0), Mailbox(0), *(Mailbox(1 + k) for k in range(peers.ranks))]


def launch(x: Any, residual: Any, result: Any, peers: Peers) -> Launch:
    """Of `peer_sum_kernel`; its pointers are x, residual, mailboxes and the result."""
    types: list[str | tuple[str, ...]] = [POINTER[x.dtype.name]]
    constants: dict[str, Any] = {}
    if residual is None:
        constants["residual_ptr"] = None
    else:
        types.append(POINTER[residual.dtype.name])
    types += ["*i64", "*i64", ("*i64",) * peers.ranks, POINTER[result.dtype.name]]
    constants |= {"N": x.size, "LAYOUT": peers.layout, "EACH": EACH, "POLLS": POLLS}
    constants |= {"LAST": True, "AHEAD": 0}
    grid = (-(-x.size // EACH),)
    return Launch(peer_sum_kernel, tuple(types), tuple(constants.items()), grid, 4, 1)


def in_turn(steps: Sequence[tuple[Launch, Sequence[Source]]]) -> list[tuple]:
    """The launches of a chain, whose sums get numbers and, where they can, no x.

    A product sends for a sum if it begins behind the sum before: what it overwrites has
    been read by then.
    """
    found = [(launch, tuple(sources)) for launch, sources in steps]
    sums = [i for i, (own, _) in enumerate(found) if own.kernel is peer_sum_kernel]
    before = -1
    for number, i in enumerate(sums):
        total, given = found[i][0], pointers_of(*found[i])
        [(own, at, _)] = given["number_ptr"][1]
        numbered = "*i64", ((own, at, NUMBERED * number),)
        given["number_ptr"] = numbered
        constants: dict[str, Any] = {"LAST": i == sums[-1]}
        [x] = given["x_ptr"][1]
        for j in range(before + 1, i):
            if found[j][1][-1] == x and sends(found[j][0], total):
                names = "own_ptr", "number_ptr", "mailboxes"
                added = {name: given[name] for name in names}
                product = pointers_of(*found[j]) | added
                layout = dict(total.constants)["LAYOUT"]
                found[j] = with_pointers(found[j][0], product, LAYOUT=layout)
                del given["x_ptr"], given["mailboxes"]
                break
        found[i] = with_pointers(total, given, **constants)
        before = i
    return found


def sends(product: Launch, total: Launch) -> bool:
    """Whether the kernel can send all that is summed up, in float32."""
    constants = dict(product.constants)
    if "mailboxes" not in constants or product.operands[-1] != "*fp32":
        return False
    return constants["M"] * constants["F"] == dict(total.constants)["N"]


Pointers = dict[str, tuple[str | tuple[str, ...], tuple[Source, ...]]]


def pointers_of(launch: Launch, sources: Sequence[Source]) -> Pointers:
    """Type and sources of each pointer that is there."""
    constants, rest = dict(launch.constants), iter(sources)
    names = [n for n in launch.kernel.arg_names if n not in constants]
    found: Pointers = {}
    for name, type_ in zip(names, launch.operands, strict=True):
        each = [type_] if isinstance(type_, str) else type_
        found[name] = type_, tuple(next(rest) for _ in each)
    return found


def with_pointers(
    launch: Launch, pointers: Pointers, **constants: Any
) -> tuple[Launch, tuple[Source, ...]]:
    """The launch with these pointers, and None for those that it had before."""
    known = dict(launch.constants)
    names = [n for n in launch.kernel.arg_names if n in pointers]
    absent = pointers_of_names(launch) - set(names)
    known = {n: v for n, v in known.items() if n not in pointers}
    known |= dict.fromkeys(sorted(absent)) | constants
    types = tuple(pointers[n][0] for n in names)
    sources = tuple(source for n in names for source in pointers[n][1])
    return launch._replace(operands=types, constants=tuple(known.items())), sources


def pointers_of_names(launch: Launch) -> set[str]:
    return set(launch.kernel.arg_names) - set(dict(launch.constants))


@jit
def peer_sum_kernel(
    x_ptr,
    residual_ptr,
    own_ptr,
    number_ptr,
    mailboxes,
    y_ptr,
    N: tl.constexpr,
    LAYOUT: tl.constexpr,
    EACH: tl.constexpr,
    POLLS: tl.constexpr,
    LAST: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """EACH numbers a program. LAST is the last sum of a chain, which counts them."""
    if AHEAD:
        let_next_begin()
    turn = turn_of(own_ptr, number_ptr, LAYOUT)
    rank = tl.load(own_ptr)
    if AHEAD:
        wait_for_those_ahead()
    at = tl.program_id(0) * EACH + tl.arange(0, EACH)
    if x_ptr is not None:
        x = tl.load(x_ptr + at, at < N, 0.0).to(tl.float32)
        send(mailboxes, at, x, at < N, rank, turn, LAYOUT)
    residual = tl.zeros([EACH], tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, at < N, 0.0).to(tl.float32)
    first = own_ptr + place_of(0, turn, LAYOUT) + tl.minimum(at, N - 1)
    total = received(first, turn, LAYOUT, POLLS) + residual
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), at < N)
    if LAST:
        tl.debug_barrier()  # all threads have read which turn it is
        done = tl.atomic_add(own_ptr + 2, 1)
        if done == tl.num_programs(0) - 1:
            tl.store(own_ptr + 2, 0)
            tl.store(own_ptr + 1, turn)


@jit
def turn_of(own_ptr, number_ptr, LAYOUT: tl.constexpr):
    """From 1, which nothing of a chain changes before its last sum ends."""
    NUMBERED: tl.constexpr = LAYOUT[3]
    number = number_ptr.to(tl.int64) - own_ptr.to(tl.int64)
    return tl.load(own_ptr + 1, volatile=True) + 1 + number // NUMBERED


@jit
def place_of(rank, turn, LAYOUT: tl.constexpr):
    """Where the numbers of a rank begin in every mailbox."""
    RANKS: tl.constexpr = LAYOUT[0]
    HEAD: tl.constexpr = LAYOUT[1]
    MOST: tl.constexpr = LAYOUT[2]
    return HEAD + (turn % 2 * RANKS + rank) * MOST


@jit
def send(mailboxes, at, x, there, rank, turn, LAYOUT: tl.constexpr):
    """Numbers with their turn to all mailboxes; a store of 64 bits is seen whole."""
    RANKS: tl.constexpr = LAYOUT[0]
    word = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF | turn << 32
    place = place_of(rank, turn, LAYOUT) + at
    for other in tl.static_range(RANKS):
        tl.store(mailboxes[other] + place, word, there, cache_modifier=".wt")


@constexpr_function
def receive_text(RANKS, MOST, POLLS):
    """Looks at the words of all ranks at once, until all are of that turn."""
    every, lines = range(RANKS), []
    for k in every:
        lines += [f"ld.relaxed.sys.global.b64 word, [$1+{8 * MOST * k}];"]
        lines += [f"mov.b64 {{x{k}, sent{k}}}, word;"]
    lines += ["setp.ne.b32 missing, sent0, turn;"]
    lines += [f"setp.ne.or.b32 missing, sent{k}, turn, missing;" for k in every[1:]]
    sums = [f"add.f32 x0, x0, x{k};" for k in every[1:]]
    return f"""{{ .reg .pred again, missing; .reg .b64 word;
        .reg .b32 turn, rest, left, sent<{RANKS}>; .reg .f32 x<{RANKS}>;
        mov.b64 {{turn, rest}}, $2;
        mov.b32 left, {POLLS};
        AGAIN: {" ".join(lines)}
        sub.s32 left, left, 1;
        setp.gt.and.s32 again, left, 0, missing;
        @again bra AGAIN;
        {" ".join(sums)}
        selp.f32 $0, 0f7FC00000, x0, missing; }}"""


@jit
def received(first, turn, LAYOUT: tl.constexpr, POLLS: tl.constexpr):
    """Sums of what all ranks sent in that turn, once it is there.

    `first` is where the numbers of rank 0 come.
    """
    return tl.inline_asm_elementwise(
        receive_text(LAYOUT[0], LAYOUT[2], POLLS),
        "=f,l,l",
        [first.to(tl.int64), turn],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
