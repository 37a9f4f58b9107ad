"""Benchmarks and studies; each module runs by itself and writes JSON."""
