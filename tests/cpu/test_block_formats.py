"""The header of the block formats is what the table in Python says.

The C++ tests include the header and the Python tests read the table: neither would see
that the one no longer follows from the other.
"""

from jaxkern.cpu.quant.block_formats import HEADER, header


def test_header_is_written_from_the_table():
    hint = "run: python -m jaxkern.cpu.quant.block_formats"
    assert HEADER.read_text() == header(), hint
