"""Sphinx: `make docs`, warnings as errors."""

import mpi4py

mpi4py.rc.initialize = mpi4py.rc.finalize = False  # reading signatures needs no running MPI

import mpicoll  # noqa: E402

project = "mpicoll"
author = "The mpicoll developers"
copyright = "2026, " + author
version = release = mpicoll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
default_role = "code"  # docstrings write `names` as Markdown does

html_theme = "furo"
html_title = f"mpicoll {version}"
