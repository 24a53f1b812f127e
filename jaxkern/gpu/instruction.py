"""An instruction of PTX for what Triton has no operation for."""

from jaxkern.gpu.triton_call import jit, tl


@jit
def instruction(TEXT: tl.constexpr):
    """Runs TEXT, which reads nothing and leaves nothing; `$0` in it is a register."""
    tl.inline_asm_elementwise(TEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
