"""Measuring how well a memory gives back what it stores."""
