"""Parts of a run that its results do not show."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.train.run_config import Optimizer
from jaxkern.train.trainer import finite, mean_of, schedule_of


def test_the_rate_rises_and_falls_as_it_is_said():
    """To the whole rate after the warmup, to `final` of it at the last step."""
    chosen = Optimizer(rate=2.0, warmup=4, final=0.25)
    rate = np.asarray(jax.vmap(schedule_of(chosen, 20))(jnp.arange(21)))
    np.testing.assert_allclose(rate[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    assert (np.diff(rate[4:]) < 0).all()
    np.testing.assert_allclose(rate[[12, 20]], [1.25, 0.5], rtol=1e-6)
    flat = schedule_of(Optimizer(rate=2.0), 5)
    np.testing.assert_allclose(flat(0), 2.0)


def test_an_evaluation_counts_tokens_and_not_batches():
    assert mean_of([(2.0, 30.0), (4.0, 10.0), (0.0, 0.0)]) == 2.5


def test_a_journal_has_only_numbers_that_json_has():
    """An evaluation that was not finite stood there as NaN."""
    values = (mean_of([(float("nan"), 3.0)]), jnp.float32(jnp.inf), jnp.float32(2.5))
    assert [finite(x) for x in values] == [None, None, 2.5]
