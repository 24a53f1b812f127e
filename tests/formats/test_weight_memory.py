"""Where weights lie in memory of large pages; only whole models tested it before."""

import numpy as np

from jaxkern.formats.weight_memory import LARGE_PAGE, WeightMemory


def test_arrays_share_it_one_behind_the_other_until_it_is_full():
    memory = WeightMemory(200)
    start, base = memory.next, memory.bytes.ctypes.data
    assert (base + start) % LARGE_PAGE == 0 and memory.bytes.size - start >= 200
    rest = np.ones(memory.bytes.size - start - 192, np.uint8)  # exactly what is left
    arrays = np.arange(10, dtype=np.int8), np.ones((2, 16), np.float32), rest
    placed = [memory.place(x) for x in arrays]
    for x, y in zip(arrays, placed, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)
    offsets = [y.unsafe_buffer_pointer() - base - start for y in placed]
    assert offsets == [0, 64, 192]
    elsewhere = memory.place(arrays[0])
    np.testing.assert_array_equal(arrays[0], elsewhere)
    assert not 0 <= elsewhere.unsafe_buffer_pointer() - base < memory.bytes.size
