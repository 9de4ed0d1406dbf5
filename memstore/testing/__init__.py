"""Conformance suites for back ends; import them from their modules, which need pytest: ``memstore.testing.stores``."""
