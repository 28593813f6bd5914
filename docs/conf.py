"""How the site is built: ``make site``; every warning is an error."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generated_pages import (  # noqa: E402
    without_links_outside,
    write_pages_of_the_root,
    write_settings_page,
)

project = "fedspu"
author = "the fedspu authors"
copyright = "the fedspu authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# Headings have the addresses that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "fedspu"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_use_unqualified_type_names = True

write_settings_page(HERE / "settings.md")
write_pages_of_the_root(HERE)


def setup(app: Any) -> None:
    """Name files that are not part of the site, instead of linking them."""

    def read(app: Any, page: str, source: list[str]) -> None:
        source[0] = without_links_outside(source[0])

    app.connect("source-read", read)
