"""Conformance suites for back ends; import them from their modules, which need pytest and hypothesis.

``memstore.testing.stores`` has ``StoreTests`` and ``StoreMachine``, ``memstore.testing.indexes`` ``IndexTests``, and
``memstore.testing.readers`` ``ReaderTests``.
"""
