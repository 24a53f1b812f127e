"""Functions of other libraries, under their names and signatures, by these operators.

    jax_nn      `dot_product_attention` of `jax.nn`, `ragged_dot` and
                `ragged_dot_general` of `jax.lax`
    flax        the `attention_fn` of Flax's attention layers
    tokamax     tokamax's operators

A model changes one import. What an argument asks for that the operators do not have is
refused by name.
"""
