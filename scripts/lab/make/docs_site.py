"""Makes the docs site (mkdocs.yml) of the pages as they are in the checkout: hooks of MkDocs.

README is the site's first page, and docs/index.md its table of contents. A link out of docs/ leads to the page if the
site has one of that file, else to the file on GitHub. The navigation has a section for each folder of docs/, its pages
in the order in which docs/index.md names them.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES: Mapping[str, str] = {  # of the checkout -> of the site; all other pages have the same place in docs/
    "README.md": "index.md",
    "docs/index.md": "contents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
SHOWN = (".md", ".png", ".svg", ".ipynb")  # other files of docs/ are read on GitHub
SECTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # folder -> its title, and the pages that stand before its own
    "guide": ("Guides", ("install.md", "comparison.md")),
    "reference": ("Reference", ()),
    "results": ("Measured", ()),
    "papers": ("Papers", ()),
    "": ("Project", ("design.md", "contributing.md", "changelog.md", "security.md")),
}
CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[[^\]]*\])\(([^()\s]+)\)")
REF = os.environ.get("DOCS_REF", "main")  # commit or tag whose files the site links to


def on_config(config: MkDocsConfig) -> None:
    config.nav = navigation()


def navigation() -> list[dict[str, Any]]:
    """The sections with their pages, as in MkDocs' `nav`."""
    named = [path for link in links((DOCS / "index.md").read_text()) if (path := DOCS / link).is_relative_to(DOCS)]
    order = {path: place for place, path in reversed(list(enumerate(named)))}
    nav: list[dict[str, Any]] = [{"Start": [{"What it is": "index.md"}, {"Every page": "contents.md"}]}]
    for folder, (title, first) in SECTIONS.items():
        own = (
            sorted((DOCS / folder).glob("*.md"), key=lambda path: (order.get(path, len(order)), path)) if folder else []
        )
        nav.append({title: [*first, *(path.relative_to(DOCS).as_posix() for path in own)]})
    return nav


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    index = files.get_file_from_path("index.md")
    assert index is not None
    files.remove(index)
    for source, page in PAGES.items():
        file = File.generated(config, page, abs_src_path=str(ROOT / source))
        file.edit_uri = posixpath.relpath(source, "docs")
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as the site needs them."""
    source = Path(page.file.abs_src_path or "")
    here = posixpath.dirname(page.file.src_uri)
    parts, end = [], 0
    for code in CODE.finditer(markdown):  # brackets in code are no links
        parts += [relinked(markdown[end : code.start()], source, here), code[0]]
        end = code.end()
    return "".join([*parts, relinked(markdown[end:], source, here)])


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """The page without the script that asks GitHub for the repository's stars."""
    return output.replace(' data-md-component="source"', "")


def relinked(text: str, source: Path, here: str) -> str:
    """The text with its links as the site needs them. here : folder of its page on the site"""
    return LINK.sub(lambda link: f"{link[1]}({target(link[2], source, here)})", text)


def target(link: str, source: Path, here: str) -> str:
    """Where a link of the file `source` leads on the site, seen from the folder `here`."""
    if "://" in link or link.startswith(("#", "mailto:")):
        return link
    file, mark, anchor = link.partition("#")
    path = Path(os.path.normpath(source.parent / file)).relative_to(ROOT).as_posix()
    if path in PAGES:
        place = PAGES[path]
    elif path.startswith("docs/") and path.endswith(SHOWN):
        place = path.removeprefix("docs/")
    else:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"https://github.com/llmserve/llmserve/{kind}/{REF}/{path}{mark}{anchor}"
    return posixpath.relpath(place, here or ".") + mark + anchor


def links(text: str) -> list[str]:
    """The files that a page links to, in its order."""
    return [link[2].partition("#")[0] for link in LINK.finditer(CODE.sub("", text)) if "://" not in link[2]]
