"""Quantising keys and values of a decode step into their slots: one launch, XLA.

The loop of layers, steps and donated caches is that of `qk_norm_rope_cache`.
"""

import jaxkern
from benchmarks.kv_cache.qk_norm_rope_cache import CODECS, H, K, measure, row_bytes


def write(query, key, value, fixed, caches, positions):
    del fixed
    pairs = zip(caches, (key, value), strict=True)
    f = jaxkern.update_quantized_kv_cache
    return query, *(f(cache, x, positions) for cache, x in pairs)


def bytes_moved(tokens, codec):
    """Keys and values read in bf16 and their codes and scales written."""
    return tokens * 2 * K * (2.0 * H + row_bytes(codec))


BY = {"one launch": (write, "triton"), "XLA": (write, "xla")}


def main(arguments):
    codecs = [name for name, codec in CODECS.items() if codec is not None]
    name = "update_quantized_kv_cache"
    return measure(name, BY, codecs, bytes_moved, arguments)
