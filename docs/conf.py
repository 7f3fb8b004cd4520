"""Configuration of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import flowrl

project = "flowrl"
author = "The flowrl authors"
copyright = "The flowrl authors"  # Sphinx's name
version = release = flowrl.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated",  # docs/generated.py: directives that insert generated tables and drawings
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
default_role = "code"  # docstrings write `name`
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"flowrl {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
