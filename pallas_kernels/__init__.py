"""GPU kernels for mixed-mode attention, each beside its jnp twin. None yet: attention is `aspire_jax.attention.xla`."""
