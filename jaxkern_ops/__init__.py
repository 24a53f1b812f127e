"""The command `jaxkern`, which first looks whose module `jaxkern` is.

Another project has that name and brings a module of it. Where it lies over this one's,
neither can be imported, and nothing of `jaxkern` could say so.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line of `jaxkern`, or says why that is another project's."""
    if reason := stranger():
        print(f"jaxkern: {reason}", file=sys.stderr)
        return 2
    try:
        from jaxkern.models.command_line import main as command_line

        return command_line()
    except KeyboardInterrupt:  # while jax is imported
        print(file=sys.stderr)
        return 130  # as a shell reports it


def stranger() -> str | None:
    """Why the module `jaxkern` is not of this project, or None; imports nothing."""
    spec = importlib.util.find_spec("jaxkern")
    if spec is None or spec.origin is None:
        return "there is no module `jaxkern`: install jaxkern-ops anew."
    if "jaxkern.quick_import" in Path(spec.origin).read_text():
        return None
    return (
        f"{spec.origin} is of another project{version_of_other()}. Run: pip uninstall "
        "jaxkern, then install jaxkern-ops anew (pip install --force-reinstall)."
    )


def version_of_other() -> str:
    try:
        return f", jaxkern {importlib.metadata.version('jaxkern')}"
    except importlib.metadata.PackageNotFoundError:
        return ""
