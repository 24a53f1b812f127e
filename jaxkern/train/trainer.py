"""`train`: a run from its configuration to its results, from wherever it was left."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxkern.train.adamw import AdamW
from jaxkern.train.arithmetic import utilisation
from jaxkern.train.checkpoints import Checkpoints
from jaxkern.train.jobs import Job, job_of
from jaxkern.train.journal import Journal, Screen
from jaxkern.train.packed_rows import PackedRows
from jaxkern.train.placement import (
    Placement,
    gathered,
    is_first,
    said_by_any,
    wait_for_all,
)
from jaxkern.train.run_config import Optimizer, RunConfig, differing_key
from jaxkern.train.texts import cut, encoded, named_files, text_of, texts_of
from jaxkern.train.train_step import (
    Metrics,
    TrainState,
    TrainStep,
    options_for,
    train_step,
)
from jaxkern.train.whole_weights import whole_weights


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
      step: batches read.
      stopped: whether somebody stopped it before its end.
      loss: of the last batch, None where there was none to read.
      written: what was written at the end, in words.
    """

    step: int
    stopped: bool
    loss: float | None
    written: str


def train(run: RunConfig, *, start: int | None = None, quiet: bool = False) -> Outcome:
    """Trains until the run's last step, from its newest checkpoint if it has one.

    The same configuration goes on bit for bit: weights, optimiser and the order of the
    rows are those of a run that nobody stopped.

    Args:
      run: see `run_config`.
      start: a checkpoint to go on from, in the place of the newest; newer ones go.
      quiet: nothing on the screen.

    Raises:
      CheckpointError: the checkpoint is half written, damaged or of another run.
      ValueError: the data or the model cannot be read so.
      OSError: a file cannot be opened or written.
    """
    placement = Placement(run.devices.layout)
    placement.check_rows(run.data.rows, run.accumulate)
    job = reading_whole(job_of(run), placement)
    rows = PackedRows(
        encoded(texts_of(run.data), job.tokenizer, job.vocabulary),
        run.data.length,
        seed=run.seed,
    )
    checks = evaluation_of(run, job)
    schedule = schedule_of(run.optimizer, run.steps)
    step = step_of(run, job, schedule)
    kept = Checkpoints(os.path.join(run.out, "checkpoints"), run.checkpoints.keep)
    about = {"config": dataclasses.asdict(run), "data": rows.digest}
    done = point_to_go_on_from(kept, about, start)
    state = step.init(placement.weights(job.params))
    base = None if job.base is None else placement.weights(job.base)
    if done:
        state = kept.restore(done, state)
    if start is not None:
        kept.forget_after(done)
    one = compiled(step, job, state)
    loss_of = jax.jit(job.loss)
    journal = Journal(run.out, done, writes=is_first())
    screen = Screen(run.steps, done, run.log_every, quiet=quiet or not is_first())
    first_words(screen, run, rows, job, placement, done)
    meter = Meter(job.operations, run.compute_dtype, done, int(state.skipped))
    lines, i, metrics, stopped = [], done, None, False

    def evaluate() -> None:
        if checks:
            write_lines(journal, lines, schedule, meter)
            losses = [
                loss_of(loss_weights(state), base, placement.batch(b)) for b in checks
            ]
            value = mean_of(losses)
            journal.add({"step": i, "evaluation": finite(value)})
            screen.say(f"step {i}: evaluation loss {value:.4f}")
            meter.pass_over(i)

    def keep() -> None:
        write_lines(journal, lines, schedule, meter)
        kept.save(i, state, about)
        journal.draw()
        meter.pass_over(i)

    try:
        with interrupts() as asked:
            while i < run.steps and not stopped:
                batch = rows.batch(i, run.data.rows)
                state, metrics = one(state, placement.batch(batch), base)
                i += 1
                lines.append((i, metrics, int(batch["mask"].sum())))
                due = i % run.log_every == 0 or i == run.steps
                if due or screen.is_behind():  # else the next batch is packed meanwhile
                    meter.wait(metrics, lines)
                    screen.step(i, meter.words(metrics))
                if due:
                    write_lines(journal, lines, schedule, meter)
                    meter.pass_over(i)
                if i % run.evaluation.every == 0 and i < run.steps:
                    evaluate()
                stopped = i < run.steps and said_by_any(bool(asked))
                if i % run.checkpoints.every == 0 or i == run.steps or stopped:
                    keep()
        if i == run.steps and i > done:
            evaluate()
            journal.draw()
        written = "" if stopped else result_of(run, job, state)
    finally:
        screen.close()
    loss = None if metrics is None else float(metrics.loss)
    return Outcome(i, stopped, loss, written)


def reading_whole(job: Job, placement: Placement) -> Job:
    """With "fsdp" the loss gathers its weights, the frozen ones too."""
    if placement.layout != "fsdp" or placement.mesh is None:
        return job
    both = whole_weights(lambda w, batch: job.loss(w[0], w[1], batch), placement.mesh)
    return replace(job, loss=lambda params, base, batch: both((params, base), batch))


def step_of(run: RunConfig, job: Job, schedule: Callable) -> TrainStep:
    chosen = run.optimizer
    adamw = AdamW(
        schedule,
        b1=chosen.b1,
        b2=chosen.b2,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
    )
    return train_step(
        lambda params, batch: job.loss(params, None, batch),
        adamw,
        compute_dtype=run.compute_dtype,
        accumulate=run.accumulate,
        clip_norm=chosen.clip_norm or None,
    )


def schedule_of(chosen: Optimizer, steps: int) -> Callable:
    """optax's warmup and cosine, from the number of updates to the rate."""
    import optax

    if chosen.warmup >= steps:
        raise ValueError(
            f"optimizer.warmup must be below steps, got {chosen.warmup} of {steps}."
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=chosen.rate / (chosen.warmup + 1) if chosen.warmup else chosen.rate,
        peak_value=chosen.rate,
        warmup_steps=chosen.warmup,
        decay_steps=steps,
        end_value=chosen.rate * chosen.final,
    )


def compiled(step: TrainStep, job: Job, state: TrainState) -> Callable:
    """(state, batch, base) -> (state, metrics). A frozen base is an argument: what a
    compiled function holds would lie in memory twice."""
    if job.base is None:
        return lambda state, batch, base: step(state, batch)

    def update(state: TrainState, batch: Any, base: Any) -> tuple[TrainState, Metrics]:
        def loss(params: Any, batch: Any) -> Any:
            return job.loss(params, base, batch)

        return replace(step, loss_fn=loss).update(state, batch)

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(
        update,
        donate_argnums=0,
        out_shardings=(shardings, None),
        compiler_options=options_for(jax.tree.leaves(shardings)),
    )


def loss_weights(state: TrainState) -> Any:
    """The weights that the loss of a step reads."""
    return jax.tree.map(lambda p, c: p if c is None else c, state.params, state.copy)


def evaluation_of(run: RunConfig, job: Job) -> list[Any]:
    """Batches of the evaluation's texts, each text once."""
    if not run.evaluation.files:
        return []
    texts = (
        text
        for path in named_files(run.evaluation.files, "evaluation.files")
        for text in cut(text_of(path), run.data.documents)
    )
    tokens = encoded(texts, job.tokenizer, job.vocabulary)
    return PackedRows(tokens, run.data.length, seed=None).whole(run.data.rows)


def mean_of(losses: list[Any]) -> float:
    values = np.array([[float(x) for x in pair] for pair in losses])
    return float((values[:, 0] * values[:, 1]).sum() / values[:, 1].sum())


def point_to_go_on_from(kept: Checkpoints, about: Any, start: int | None) -> int:
    """The newest checkpoint, or that asked for, checked; 0 to begin."""
    there = kept.steps()
    step = start if start is not None else (there[-1] if there else 0)
    if step == 0:
        return 0
    before = kept.run_of(step)
    key = differing_key(before["config"], about["config"])
    where = f"{kept.folder / str(step)}: the checkpoint is of another run:"
    advice = "Put it back, or begin in another folder (out)."
    if key is not None:
        raise ValueError(f"{where} {key} has another value here. {advice}")
    if before["data"] != about["data"]:
        raise ValueError(f"{where} the texts or their tokens are others. {advice}")
    return step


def first_words(
    screen: Screen,
    run: RunConfig,
    rows: PackedRows,
    job: Job,
    placement: Placement,
    done: int,
) -> None:
    size = sum(p.size for p in jax.tree.leaves(job.params))
    screen.say(
        f"{size} weights, {rows.num_tokens} tokens in {len(rows.rows)} rows of "
        f"{run.data.length}, {placement.count} device(s)"
        + (f", layout {run.devices.layout}" if placement.count > 1 else "")
    )
    if done:
        screen.say(f"goes on from the checkpoint of step {done}")


class Meter:
    """Speed of the last steps, without that of the first, which compiles."""

    def __init__(self, operations: float, dtype: str, done: int, skipped: int):
        self.operations, self.dtype = operations, dtype
        self.since: float | None = None
        self.rate: float | None = None
        self.last, self.skipped = done, skipped

    @property
    def share(self) -> float | None:
        """Of the devices' limit."""
        if self.rate is None:
            return None
        return utilisation(self.rate, self.operations, self.dtype)

    def wait(self, metrics: Metrics, lines: list[Any]) -> None:
        """Until the step is done; its tokens count from the second one on."""
        jax.block_until_ready(metrics.loss)
        now = time.perf_counter()
        tokens = sum(n for i, _, n in lines if i > self.last)
        if self.since is not None:
            new = tokens / max(now - self.since, 1e-9)
            self.rate = new if self.rate is None else 0.8 * self.rate + 0.2 * new
        self.since, self.last = now, lines[-1][0]

    def pass_over(self, i: int) -> None:
        """What was done since step i is no training."""
        if self.since is not None:
            self.since, self.last = time.perf_counter(), i

    def words(self, metrics: Metrics) -> str:
        said = [f"loss {float(metrics.loss):.4f}"]
        if bool(metrics.skipped):
            said.append("skipped: not finite")
        if self.rate is not None:
            mfu = "unknown" if self.share is None else f"{100 * self.share:.1f} %"
            said += [f"{self.rate:.0f} tokens/s", f"MFU {mfu}"]
        return ", ".join(said)


def write_lines(
    journal: Journal, lines: list[Any], schedule: Callable, meter: Meter
) -> None:
    """What is known of each step since the last call."""
    found: list[dict[str, Any]] = []
    for i, metrics, tokens in lines:
        found.append(
            {
                "step": i,
                "loss": finite(metrics.loss),
                "grad_norm": finite(metrics.grad_norm),
                "rate": float(schedule(i - 1 - meter.skipped)),
                "tokens": tokens,
                "skipped": bool(metrics.skipped),
            }
        )
        meter.skipped += bool(metrics.skipped)
    if found and meter.rate is not None:
        found[-1] |= {"tokens_per_second": meter.rate, "mfu": meter.share}
    journal.add(*found)
    lines.clear()


def finite(x: Any) -> float | None:
    """The number; NaN and infinities are null in a journal, as JSON has none."""
    return float(x) if np.isfinite(x) else None


def result_of(run: RunConfig, job: Job, state: TrainState) -> str:
    """Writes the result, by one process."""
    params = gathered(state.params)
    written = job.write(params, run.out) if is_first() else ""
    wait_for_all("written")
    return written


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Gathers the first SIGINT or SIGTERM; a second one ends the program at once."""
    found: list[int] = []

    def gather(number: int, frame: object) -> None:
        del frame
        if found:
            raise KeyboardInterrupt
        found.append(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, gather)
    except ValueError:  # not the main thread, which alone hears signals
        pass
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
