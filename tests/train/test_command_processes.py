"""`jaxkern train` in two processes of four devices: one is killed, and the run goes on.

`test_two_processes.py` has the same of a loop that the test wrote; here it is the
command's, with its checkpoints, their sums and what one process alone writes.
"""

import shutil
import signal

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

from tests.train.processes import free_port, said_by_all, started
from tests.train.test_command import lines_of, settings, state_of

STEPS, KILLED_IN = 6, 5
EXAMPLE = """
compute_dtype = "float32"
devices.layout = "fsdp"
[model]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
rms_norm_eps = 1e-5
[data]
tokenizer = "bytes"
documents = "paragraphs"
length = 32
"""
DYING = f"""
import os, sys
from jaxkern.models.command_line import main
from jaxkern.train.packed_rows import PackedRows
batch = PackedRows.batch
def dying(self, i, rows):
    if i == {KILLED_IN - 1}:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    return batch(self, i, rows)
PackedRows.batch = dying
sys.exit(main(sys.argv[1:]))
"""
WHOLE = "import sys; from jaxkern.models.command_line import main; sys.exit(main())"


def start(config, out, count, dies=None):
    """That many processes with eight devices in all; process `dies` does."""
    port, found = free_port(), []
    for i in range(count):
        joined = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count)]
        joined += ["--process", str(i)]
        command = ["train", config, *settings(out, steps=STEPS), "--no-cache"]
        code = DYING if i == dies else WHOLE
        joined = joined if count > 1 else []
        found.append(started(count, ["-c", code, *command, *joined]))
    return found


def said_by(processes):
    """What the first one said."""
    said = said_by_all(processes)
    assert ["model\n" in out for out, _ in said] == [True] + [False] * (len(said) - 1)
    return said[0][1]


@pytest.mark.full
def test_a_killed_run_goes_on_bit_for_bit_and_in_one_process(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(EXAMPLE)
    whole, out, alone = (tmp_path / name for name in ("whole", "killed", "alone"))
    said_by(start(str(config), whole, 2))
    processes = start(str(config), out, 2, dies=1)
    try:
        assert processes[1].wait(timeout=300) == -signal.SIGKILL
    finally:
        for p in processes:  # the other waits for it
            p.kill()
            p.communicate()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "4"]
    shutil.copytree(out, alone)
    assert "goes on from the checkpoint of step 4" in said_by(
        start(str(config), out, 2)
    )
    assert lines_of(out) == lines_of(whole)
    ends = [state_of(path, STEPS) for path in (whole, out)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    for name in ("model.safetensors", "config.json"):
        a, b = ((p / "model" / name).read_bytes() for p in (whole, out))
        assert a == b, name
    # one process sums over devices in another order
    assert "goes on from the checkpoint of step 4" in said_by(
        start(str(config), alone, 1)
    )
    for a, b in zip(lines_of(alone), lines_of(whole), strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=1e-5)
