"""Attention: the parts of a softmax, and an implementation for each kind of device."""
