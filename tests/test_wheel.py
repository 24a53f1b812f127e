"""The wheel that the sources in the sdist make runs, on any Python of the platform.

Editable installs alone were tried: a file that a wheel or an sdist lacks, or a wheel
that was made without its library, showed nowhere.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SDIST = "from scikit_build_core.build import build_sdist; build_sdist({!r})"
TOOLS = ("cmake", "ninja", "c++")


def python(*arguments: str | Path, cwd: Path, **env: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:] + run.stdout[-4000:]
    return run.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    python("-c", SDIST.format(str(folder)), cwd=ROOT)
    [archive] = folder.glob("*.tar.gz")
    return archive


def test_the_sdist_has_what_is_built_and_no_more(sdist):
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    sources = [*(ROOT / "jaxkern").rglob("*"), ROOT / "jaxkern_ops/__init__.py"]
    kinds = {".py", ".cc", ".h", ".json", ".typed"}
    wanted = {str(f.relative_to(ROOT)) for f in sources if f.suffix in kinds}
    wanted |= {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"}
    wanted |= {"jaxkern/py.typed"}
    assert len(wanted) > 500 and not wanted - names
    assert not [n for n in names if n.endswith((".so", ".pyc"))]
    assert sdist.stat().st_size < 4_000_000


@pytest.mark.full
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="no C++ compiler, cmake")
def test_the_wheel_of_the_sdist_runs_a_kernel(sdist, tmp_path):
    """Minutes: every instruction set is compiled. Nothing is fetched."""
    flags = "--no-index --no-deps --no-build-isolation --quiet".split()
    python("-m", "pip", "wheel", *flags, "-w", tmp_path, sdist, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [n for n in names if n.startswith("jaxkern/cpu/libjaxkern_cpu.")]
    assert "jaxkern/py.typed" in names
    assert not [n for n in names if n.endswith((".cc", ".h"))]

    site = tmp_path / "site"
    flags = "--no-index --no-deps --quiet --target".split()
    python("-m", "pip", "install", *flags, site, wheel, cwd=tmp_path)
    # -S: the finder of an editable install would be asked first, whatever the path says
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    env = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    said = python("-SP", ROOT / "tests/installed.py", cwd=tmp_path, **env)
    assert str(site) in said
    command = site / "bin" / "jaxkern"
    assert "jaxkern 0.1.0" in python("-SP", command, "--version", cwd=tmp_path, **env)
