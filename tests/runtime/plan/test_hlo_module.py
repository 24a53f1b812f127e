"""The protobuf reader against bytes written by hand, by XLA, and damaged."""

import zlib

import jax
import jax.numpy as jnp
import pytest

from jaxkern import rms_norm
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.triton_call import missing
from jaxkern.runtime.plan.hlo_module import HloModule, Message, Shape
from jaxkern.runtime.plan.triton_launch import read_launch, triton_launch


def test_the_wire_format():
    """The example of the format's own guide: field 1 is 150; then text and packed."""
    data = bytes.fromhex("089601") + bytes.fromhex("120774657374696e67")
    data += bytes.fromhex("3206038e029ea705")
    message = Message(data)
    assert message.integer(1) == 150
    assert message.text(2) == "testing"
    assert message.integers(6) == [3, 270, 86942]
    assert message.integer(9) == 0 and message.text(9) == "" and not message.messages(9)
    assert Message(bytes.fromhex("08ffffffffffffffffff01")).integer(1) == -1


@pytest.mark.parametrize(
    "data", ["08", "0896", "1207746573", "0b", "08" + "ff" * 11, "12ffffffffff7f"]
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(ValueError, match="no protobuf"):
        Message(bytes.fromhex(data)).integer(1)
    with pytest.raises(ValueError, match=r"no protobuf|no HLO module"):
        HloModule(bytes.fromhex(data))


def test_an_empty_module_is_refused():
    with pytest.raises(ValueError, match="no HLO module: it has no entry"):
        HloModule(b"")


@pytest.mark.parametrize(
    "dtype, name, size",
    [
        ("float32", "f32", 4),
        ("bfloat16", "bf16", 2),
        ("float8_e4m3fn", "f8e4m3fn", 1),
        ("int4", "s4", 0.5),
        ("uint16", "u16", 2),
        ("bool", "pred", 1),
        ("complex64", "c64", 8),
        ("float4_e2m1fn", "f4e2m1fn", 0.5),
        ("float8_e8m0fnu", "f8e8m0fnu", 1),
    ],
)
def test_element_types_are_those_of_xla(dtype, name, size):
    """The numbers of the types, against XLA's own text."""
    spec = jax.ShapeDtypeStruct((3, 4), dtype)
    ir = jax.jit(lambda x: x).lower(spec).compiler_ir("hlo")
    assert f"{name}[3,4]" in ir.as_hlo_text()
    module = HloModule(ir.as_serialized_hlo_module_proto())
    shape = module.entry.instructions[0].shape
    assert str(shape) == f"{name}[3,4]"
    assert shape.bytes == 12 * size and shape.elements == 12
    assert Shape("tuple", (), (shape, shape)).bytes == 2 * shape.bytes


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
def test_a_triton_launch_is_read_from_its_custom_call():
    x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    w = jax.ShapeDtypeStruct((256,), jnp.float32)
    with compiling_for(90):
        lowered = jax.jit(rms_norm).trace(x, w).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    found = [triton_launch(i) for i in HloModule(module).schedule()]
    (launch,) = [one for one in found if one is not None]
    assert "norm" in launch.name
    assert launch.grid[0] > 0 and launch.grid[1:] == (1, 1)
    assert launch.num_warps in (1, 2, 4, 8, 16)
    assert launch.capability == 90
    assert ".target sm_90" in launch.ptx and launch.name in launch.ptx
    assert "tt.func" in launch.ttir


def test_a_damaged_launch_is_none():
    assert read_launch("no zlib") is None
    broken = "".join(f"\\{byte:02X}" for byte in zlib.compress(b"\x0a\xff"))
    assert read_launch(broken) is None
