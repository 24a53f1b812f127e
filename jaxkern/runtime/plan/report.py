"""What XLA made of a function, in numbers."""

import collections
import dataclasses

from jaxkern.lowering.explain import every_equation
from jaxkern.primitives.linear.policy import Policy
from jaxkern.runtime.plan.compiler_dump import CommandBufferReport
from jaxkern.runtime.plan.record import PlanRecord


@dataclasses.dataclass(frozen=True)
class Report:
    """What XLA made of a function.

    Attributes:
      equations: of the jaxpr by primitive, bodies of loops counted once.
      instructions: of the executable by kind, likewise.
      views: instructions that cost nothing, not among them.
      kernels: that XLA did not write itself, by name.
      command_buffers: launches in CUDA graphs.
      policy: of dtypes; None where the operands' hold.
    """

    equations: dict[str, int]
    instructions: dict[str, int]
    views: int
    kernels: dict[str, int]
    command_buffers: CommandBufferReport
    policy: Policy | None

    def __str__(self) -> str:
        def count(found: dict[str, int]) -> str:
            shown = ", ".join(f"{n} {name}" for name, n in found.items())
            return f"{sum(found.values())}" + (f": {shown}" if shown else "")

        return "\n".join(
            (
                f"equations before     {count(self.equations)}",
                f"instructions after   {count(self.instructions)}",
                f"views, free          {self.views}",
                f"kernels of others    {count(self.kernels)}",
                f"command buffers      {self.command_buffers}",
                f"dtype policy         {self.policy or 'that of the operands'}",
            )
        )


def report_of(plan: PlanRecord) -> Report:
    """What `Plan.report` documents."""
    found = every_equation(plan.stage.traced.jaxpr.jaxpr) if plan.stage else ()
    names = collections.Counter(e.primitive.name for e in found)
    instructions = plan.instructions()
    return Report(
        equations=dict(names.most_common()),
        instructions=dict(
            collections.Counter(i.kind for i in instructions).most_common()
        ),
        views=plan.nops,
        kernels=dict(
            collections.Counter(
                i.kernel for i in instructions if i.kernel
            ).most_common()
        ),
        command_buffers=plan.command_buffer_report(),
        policy=plan.policy,
    )
