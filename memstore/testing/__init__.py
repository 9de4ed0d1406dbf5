"""Conformance suites for back ends; import them from their modules, which need pytest and hypothesis.

``memstore.testing.stores``, ``memstore.testing.indexes``, and ``memstore.testing.memories`` for whole memories.
"""
