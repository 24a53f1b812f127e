"""For the tests of users: failures on demand, and float64 oracles."""

from jaxkern.runtime.testing.testing import inject_faults, reference

__all__ = ["inject_faults", "reference"]
