"""The inspector page: a local web page that shows what a memory holds, and what was retrieved from it and why.

``serve`` is what ``memstore view`` does. ``README.md`` here tells how the parts fit together.
"""

from __future__ import annotations

from memstore.tools.inspector.app import serve

__all__ = ["serve"]
