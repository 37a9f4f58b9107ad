"""Trace-driven simulation: the library's own draft-length policies on recorded or generated acceptances."""
