"""Codecs of the tests of TurboQuant: every width, groups, other codebooks."""

from jaxkern import Float8Codec, IntCodec, TurboQuantCodec

CODECS = [
    *(TurboQuantCodec(bits) for bits in (1, 2.25, 3, 4, 5, 6, 7, 8)),
    TurboQuantCodec(2, group=32, seed=3),
    TurboQuantCodec(4, codebook=tuple(i - 7.5 for i in range(16))),
    IntCodec(8),
    IntCodec(4, group=32),
    IntCodec(7, group=16),
    Float8Codec(),
    Float8Codec(group=32),
]
