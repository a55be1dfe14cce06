"""How the documentation is built; ``nox -s docs`` does it, with warnings as errors."""

from importlib.metadata import version as version_of
from typing import Any

project = "trio-vllm"
author = "The trio-vllm developers"
project_copyright = "The trio-vllm developers, Apache-2.0"
release = version = version_of("trio-vllm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"trio-vllm {release}"
exclude_patterns = ["_build", "explanation/speed_table.md"]  # the second is a part of a page

default_role = "py:obj"  # `Name` in docstrings
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Cancellation", "notes_style")]


def cut_field_help(
    _app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Take out what ``help()`` says of fields: here they are members with docstrings of their own."""
    if what == "class" and "Fields:" in lines:
        del lines[lines.index("Fields:") :]


def setup(app: Any) -> None:
    """Called by sphinx."""
    app.connect("autodoc-process-docstring", cut_field_help, priority=1)
