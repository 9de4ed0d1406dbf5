"""Measuring whether a memory gives back what was put into it."""
