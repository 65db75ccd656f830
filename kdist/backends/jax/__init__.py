"""The JAX backend: one global program over a mesh of all devices of all workers."""
