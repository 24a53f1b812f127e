"""A CPU with eight host devices unless told otherwise; set before JAX starts.

TEST_GPUS=0,1,2 gives each worker one of these GPUs.
"""

import gc
import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
gpus, worker = os.environ.get("TEST_GPUS"), os.environ.get("PYTEST_XDIST_WORKER")
if gpus and worker:
    several = gpus.split(",")
    number = int(worker.removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = several[number % len(several)]
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()


if os.environ.get("QUICK_EAGER"):  # see the Makefile
    from tests import quick_eager

    quick_eager.install()


@pytest.fixture
def compilation_cache_as_it_was():
    """`enable_compilation_cache` is for a whole process, and here for one test."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    held = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in held.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def pytest_collection_finish(session):
    """Python's collector would look through all tests and JAX again and again.

    It took a seventh of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure(config):
    gc.unfreeze()


GROWTH = 3 << 29  # bytes, 1.5 GiB
after_clearing = [0]  # bytes


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say it so."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pytest_runtest_logfinish(nodeid, location):
    """Executables of thousands of tests would stay in memory: 5 GB in each worker."""
    if resident_bytes() > after_clearing[0] + GROWTH:
        import jax

        jax.clear_caches()
        gc.collect()
        after_clearing[0] = resident_bytes()
