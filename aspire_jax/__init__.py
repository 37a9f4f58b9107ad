"""Exact long-context batch decoding by asynchronous self-speculation, in JAX."""
