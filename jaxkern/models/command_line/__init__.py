"""The command line `jaxkern`: one file for each command, `main` puts them together."""

from jaxkern.models.command_line.demo import demo_model
from jaxkern.models.command_line.main import main
from jaxkern.models.command_line.statistics import peak_memory

__all__ = ["demo_model", "main", "peak_memory"]
