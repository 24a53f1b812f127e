"""`render`: a file's chat template, which may come from anybody, within bounds.

Jinja's sandbox keeps a template from Python's insides, not from all memory and time:
`'{:>1000000000}'.format(1)`, `'x' * 10**10`, a string that doubles in a loop. So a
template runs in a process of its own with limits of time, memory and output, which the
system ends. Only a template that can do no more than write its messages once runs here.

This file is also the program of that process: it imports nothing of jaxkern, whose
import of JAX takes longer than a template.
"""

import datetime
import functools
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CPU_SECONDS = 1  # of computing, rounded up to the system's whole seconds
SECONDS = 3.0  # until the process is ended, whatever it does
MEMORY = 512 * 2**20  # bytes of address space, where the system can limit them
OUTPUT = 1_000_000  # characters, and
OUTPUT_PER_INPUT = 10  # for each character of the messages
LONGEST_ERROR = 500  # characters
SIMPLE_CHARACTERS, SIMPLE_NODES = 20_000, 500  # of templates that run in this process


def render(
    template: str, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> str:
    """The messages as the template writes them.

    Args:
      template: Jinja source.
      messages: `{"role": "user", "content": "..."}` and the like.
      **variables: further names that the template may use; what JSON can hold.

    Raises:
      ValueError: the template fails, or takes more than the limits above.
    """
    request = {
        "template": template,
        "variables": {**variables, "messages": [dict(m) for m in messages]},
    }
    if is_simple(template):
        return _rendered(**request)
    return _rendered_apart(json.dumps({**request, "path": sys.path}))


def _rendered_apart(request: str) -> str:
    """The answer of the process below to a request in JSON."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=request.encode(),
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {SECONDS:g} seconds") from None
    if done.returncode == -getattr(signal, "SIGXCPU", math.inf):
        raise ValueError("it computes for more than a second")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(
            f"its process ended with code {done.returncode}. {last[:LONGEST_ERROR]}"
        ) from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["text"]


def _rendered(template: str, variables: Mapping[str, Any]) -> str:
    given = sum(len(str(v)) for m in variables["messages"] for v in m.values())
    limit = OUTPUT + OUTPUT_PER_INPUT * given
    pieces, size = [], 0
    for piece in _environment().from_string(template).generate(**variables):
        size += len(piece)
        if size > limit:
            raise ValueError(f"it writes more than {limit} characters")
        pieces.append(piece)
    return "".join(pieces)


@functools.cache
def _environment():
    """Jinja as chat templates expect it, without access to Python's insides."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now
    )
    return environment


@functools.lru_cache(maxsize=16)
def is_simple(template: str) -> bool:
    """Whether all it can do is to write its parts once for each message.

    It assigns nothing, calls nothing but `raise_exception`, and its loops are over the
    messages and not within each other: so it takes at most as many steps as it has
    nodes, for each message, and each expression is as long as its leaves together.
    """
    from jinja2 import nodes

    if not isinstance(template, str) or len(template) > SIMPLE_CHARACTERS:
        return False
    try:
        tree = _environment().parse(template)
        found = list(_walk(tree))
    except Exception:  # whatever it is: the other process says it
        return False
    plain = (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name),
        *(nodes.Getattr, nodes.Getitem, nodes.If, nodes.CondExpr, nodes.Neg, nodes.Not),
        *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Add, nodes.Concat),
        *(nodes.Break, nodes.Continue, nodes.List, nodes.Tuple),
    )

    def allowed(node: nodes.Node) -> bool:
        match node:
            case nodes.For(recursive=False, iter=nodes.Name(name="messages")):
                return not any(isinstance(n, nodes.For) for n in _walk(node, False))
            case nodes.Call(node=nodes.Name(name="raise_exception"), args=[_]):
                return not (node.kwargs or node.dyn_args or node.dyn_kwargs)
            case nodes.Test():
                return not (node.args or node.kwargs)
        return type(node) in plain

    return len(found) <= SIMPLE_NODES and all(allowed(node) for node in found)


def _walk(node, itself: bool = True) -> Iterable:
    """A node of a template and all below it."""
    if itself:
        yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _limit_this_process() -> None:
    try:
        import resource
    except ImportError:  # a system without limits; the time until the end remains
        return
    seconds = math.ceil(time.process_time()) + CPU_SECONDS
    for kind, limit in (("CPU", seconds), ("AS", MEMORY), ("FSIZE", 0), ("CORE", 0)):
        # past the first limit of CPU a signal says why, past the second it ends at once
        hard = limit + 1 if kind == "CPU" else limit
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, hard))
        except (AttributeError, ValueError, OSError):
            continue  # not on this system


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": _rendered(request["template"], request["variables"])}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY // 2**20} MB of memory"}
    except Exception as error:  # the template is anyone's; so is what it provokes
        return {"error": f"{error or type(error).__name__}"[:LONGEST_ERROR]}


def main() -> None:
    """Answers one request on stdin."""
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]  # jinja2 is where the other process found it
    _environment()
    _limit_this_process()
    answer = _answer(request)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
