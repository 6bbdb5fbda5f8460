"""Sphinx configuration; `_ext/from_code.py` makes the reference out of the code at build time."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from changeover import __version__

project = "Changeover"
author = "The Changeover authors"
project_copyright = "The Changeover authors. Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "from_code"]
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "Changeover"
html_static_path = ["_static"]
html_css_files = ["changeover.css"]
smartquotes = False  # "--json" must not become a dash
