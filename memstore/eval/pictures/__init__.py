"""Pictures of what is in a memory and of what was retrieved from it: each function returns a matplotlib figure.

All are readable in black and white: amounts are shades of grey, kinds have hatches or markers. Texts of documents on an
axis are shown as they are, and never taken for formulas.
"""

from memstore.eval.picture import check_picture, save_picture
from memstore.eval.pictures.audits import audit_picture
from memstore.eval.pictures.landmarks import document_margins, similarity
from memstore.eval.pictures.traces import heat, margins, tiers

__all__ = [
    "audit_picture",
    "check_picture",
    "document_margins",
    "heat",
    "margins",
    "save_picture",
    "similarity",
    "tiers",
]
