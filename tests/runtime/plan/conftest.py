"""Fixtures of the tests of compiled calls on disk."""

import pytest

from jaxkern.runtime import enable_compilation_cache
from jaxkern.runtime.plan import kept_calls, surroundings


@pytest.fixture
def kept_folder(tmp_path, monkeypatch, compilation_cache_as_it_was):
    """Where calls are kept, and nothing that jax keeps itself.

    Tests beside these declare kernels of their own, with which no call is kept. This
    package's files are not read for each key.
    """
    monkeypatch.setattr(surroundings, "every_op", dict)
    monkeypatch.setattr(surroundings, "sources", list)
    monkeypatch.setattr(surroundings, "digest_of_sources", lambda: "1" * 64)
    enable_compilation_cache(tmp_path)
    return tmp_path / kept_calls.FOLDER
