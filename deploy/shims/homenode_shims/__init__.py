"""Shims between fleet schedulers and the agents of their hosts."""
