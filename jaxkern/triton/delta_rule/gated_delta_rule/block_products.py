"""Products of blocks of 16 x 16 that a warp has in its registers.

A block lies as matrix instructions leave it: lane 4 g + t holds columns 2 t and 2 t + 1
of rows g and g + 8, and columns 2 t + 8 and 2 t + 9 of both. Terms of a sum may come in
any order: where columns 2 t and 2 t + 1 are the terms t and t + 4 of an instruction, a
block is its left operand, and turned its right one. Nothing leaves its lane.

A left operand needs other registers side by side than a result has, so it is a copy of
its own. The copy is the negative: with plain moves the assembler copies for every use.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit

# pairs (8 columns of the result, 8 terms), where others have nothing to add
PARTS = {
    None: ((0, 0), (0, 1), (1, 0), (1, 1)),
    "on the diagonal": ((0, 0), (1, 1)),  # two blocks of 8 x 8
    "first terms, second columns": ((1, 0),),
    "second terms, first columns": ((0, 1),),
    "second terms, second columns": ((1, 1),),
}
KINDS = {
    "fp32": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "bf16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "fp16": "m16n8k16.row.col.f32.f16.f16.f32",
}


@constexpr_function
def left_text(signs):
    """Registers 0, 2, 1, 3 and 4, 6, 5, 7 are those of two instructions."""
    order = (0, 2, 1, 3, 4, 6, 5, 7)
    return "\n".join(f"xor.b32 ${i}, ${8 + x}, {signs};" for i, x in enumerate(order))


@constexpr_function
def product_text(dtype, parts, add):
    """Operands: 8 registers of the result, then of x, y and, to `add` to, sums."""
    lines = [".reg .f32 zero;", "mov.f32 zero, 0f00000000;"]
    for n in range(2):
        result = [f"${4 * n + i}" for i in range(4)]
        sums = [f"${24 + 4 * n + i}" for i in range(4)] if add else ["zero"] * 4
        for s in [s for half, s in PARTS[parts] if half == n]:
            left = [f"${8 + 4 * s + i}" for i in range(4)]
            right = [f"${16 + 4 * s + 2 * n + i}" for i in range(2)]
            operands = [", ".join(x) for x in (result, left, right, sums)]
            vectors = ", ".join(f"{{{x}}}" for x in operands)
            lines.append(f"mma.sync.aligned.{KINDS[dtype.name]} {vectors};")
            sums = result
        if sums != result:
            lines += [f"mov.f32 {to}, {x};" for to, x in zip(result, sums, strict=True)]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def left_constraints(kind):
    return ",".join([f"=&{kind}"] * 8 + [kind] * 8)


@constexpr_function
def product_constraints(operands, add):
    return ",".join(["=&f"] * 8 + [operands] * 16 + ["f"] * (8 if add else 0))


@gluon_jit
def negative_left(x, KIND: gl.constexpr, SIGNS: gl.constexpr):
    return gl.inline_asm_elementwise(
        left_text(SIGNS), left_constraints(KIND), [x], x.dtype, True, 8
    )


@gluon_jit
def subtract_product(x, y, sums, PARTS: gl.constexpr = None):
    """sums - x y^T by tf32."""
    return gl.inline_asm_elementwise(
        product_text(gl.float32, PARTS, True),
        product_constraints("f", True),
        [negative_left(x, "f", "0x80000000"), y, sums],
        gl.float32,
        True,
        8,
    )


@gluon_jit
def negative_product(x, y, PARTS: gl.constexpr = None):
    """-x y^T by tf32."""
    return gl.inline_asm_elementwise(
        product_text(gl.float32, PARTS, False),
        product_constraints("f", False),
        [negative_left(x, "f", "0x80000000"), y],
        gl.float32,
        True,
        8,
    )


@gluon_jit
def subtract_product_of_words(x, y, sums, DTYPE: gl.constexpr):
    """sums - x y^T, of `[16, 32]` numbers of 16 bits in `[16, 16]` words."""
    return gl.inline_asm_elementwise(
        product_text(DTYPE, None, True),
        product_constraints("r", True),
        [negative_left(x, "r", "0x80008000"), y, sums],
        gl.float32,
        True,
        8,
    )
