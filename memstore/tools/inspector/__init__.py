"""The inspector: a local web page that shows the contents of a memory, and why blocks were retrieved.

``app.serve`` does the work of ``memstore view``. ``README.md`` here tells how the parts fit together.
"""
