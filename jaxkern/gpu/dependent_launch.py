"""What a kernel does to begin before the one ahead of it has ended.

A launch of a chain (`launch_chain.py`) may be resident while the kernel ahead of it
runs. It may read what no kernel of the chain writes, such as weights. Before it reads
anything else, and before it writes, it waits until the kernel ahead has ended and its
writes are seen; that one has waited likewise, so all before it have ended too.

A kernel has a constant AHEAD of one of these values for it. Where nobody asks for it
`triton_call` says NOT.
"""

from jaxkern.gpu.instruction import instruction
from jaxkern.gpu.triton_call import jit

NOT, WAIT, READ, READ_EARLIER = 0, 1, 2, 3
"""Launched alone; waits first; reads the operands called EARLY, or EARLIER, then waits.

The latter were written by kernels before the one just ahead, which is LATE: it lets the
next begin once it has waited for them itself. They are read past the first cache.
"""

EARLY = ("w_ptr", "tiles_ptr", "norm_ptr")
EARLY += ("state_ptr", "inputs_ptr", "taps_ptr", "a_log_ptr", "dt_bias_ptr")
EARLY += ("kv_lengths_ptr", "q_offset_ptr", "positions_ptr", "lengths_ptr")
EARLY += ("cos_ptr", "sin_ptr", "query_weight_ptr", "key_weight_ptr")
EARLY += ("old_key_cache_ptr", "old_value_cache_ptr")
EARLY += ("old_keys_ptr", "old_corrections_ptr", "old_g_ptr", "accepted_ptr")
EARLIER = ("early_ids_ptr", "early_down_ptr", "early_shared_ptr")
EARLIER += ("early_scales_ptr", "early_shared_scales_ptr")


@jit
def let_next_begin():
    """The kernel behind may begin once all programs have been here."""
    instruction("griddepcontrol.launch_dependents; // $0")


@jit
def wait_for_those_ahead():
    """Returns when the kernels ahead have ended; at once where there is none."""
    instruction("griddepcontrol.wait; // $0")


@jit
def begin_behind_those_ahead():
    """The first thing of a kernel that reads nothing early."""
    let_next_begin()
    wait_for_those_ahead()
