"""Conformance suites for back ends; import them from their modules, which need pytest and hypothesis.

``memstore.testing.stores`` has ``StoreTests``, ``memstore.testing.indexes`` ``IndexTests``,
``memstore.testing.readers`` ``ReaderTests``, and ``memstore.testing.memories`` a state machine for whole memories.
"""
