"""jaxkern: the operators of today's models as JAX primitives with every rule."""
