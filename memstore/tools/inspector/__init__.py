"""The inspector page: a local web page that shows what a memory holds, and what was retrieved from it and why.

``app.serve`` is what ``memstore view`` does. ``README.md`` here tells how the parts fit together.
"""
