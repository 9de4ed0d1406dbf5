"""The site of the documentation (`make site`): the pages as they lie in the tree, with what they link to."""

from memstore._version import __version__

project = "memstore"
copyright = "the authors of memstore"
release = version = __version__
extensions = ["myst_parser"]
include_patterns = ["docs/site/index.md", "*.md", "docs/*.md", "docs/notes/*.md", "docs/decisions/*.md"]
suppress_warnings = ["toc.not_included"]  # notes and decisions are reached by links
root_doc = "docs/site/index"
html_extra_path = ["start"]  # index.html of the folder, which leads there
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"memstore {__version__}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#9a6700", "color-brand-content": "#9a6700"},
    "dark_css_variables": {"color-brand-primary": "#f5b942", "color-brand-content": "#f5b942"},
}
html_show_sourcelink = False
html_copy_source = False
