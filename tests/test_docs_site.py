"""The docs site: it builds without a warning, its links lead somewhere, and it shows what GitHub shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from make import docs_site
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
ON_GITHUB = re.compile(r"https://github\.com/llmserve/llmserve/(?:blob|tree)/main/(.+)")
COUNTED = ("h1", "h2", "h3", "li", "pre", "td", "th", "img", "blockquote")
CELLS = ("td", "th")  # only those with a text: a table without rows gets one of empty cells on the site


class Read(HTMLParser):
    """A page: its links, its ids, and how often it has each of the counted elements in its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._in_article = False
        self._cell = ""  # that has begun, without a text so far
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._in_article |= tag == "article"
        self.links += [value for name in ("href", "src") if (value := values.get(name)) and tag != "link"]
        self.ids |= {value for value in (values.get("id"), values.get("name")) if value}
        if tag in CELLS:
            self._cell = tag
        elif self._in_article and tag in COUNTED:
            self.counts[tag] += 1

    def handle_data(self, data: str) -> None:
        if self._in_article and self._cell and data.strip():
            self.counts[self._cell] += 1
            self._cell = ""

    def handle_endtag(self, tag: str) -> None:
        self._cell = "" if tag in CELLS else self._cell
        self._in_article &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built. DOCS_PYTHON names the interpreter of an environment that has MkDocs; scripts/test makes one."""
    python = os.environ.get("DOCS_PYTHON")
    if not python:
        pytest.skip("DOCS_PYTHON is not set: run ./scripts/test, which installs MkDocs in an environment")
    folder = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def read(site: Path) -> dict[str, Read]:
    """The pages by their path in the site."""
    return {path.relative_to(site).as_posix(): Read(path.read_text()) for path in site.rglob("*.html")}


def page_of(source: str) -> str:
    """The path in the site of a page of docs/, or of one that docs_site adds."""
    folder, _, name = source.removesuffix(".md").rpartition("/")
    parts = [part for part in (folder, "" if name == "index" else name) if part]
    return "/".join([*parts, "index.html"])


@pytest.mark.slow
def test_every_page_of_the_checkout_is_on_the_site(read: dict[str, Read]) -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    shown = {page_of(page) for page in {*pages, *docs_site.PAGES.values()}}
    assert sorted(shown - read.keys()) == []


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path, read: dict[str, Read]) -> None:
    broken = []
    for name, page in read.items():
        if name == "404.html":
            continue
        for link in page.links:
            on_github = ON_GITHUB.match(link)
            if on_github is not None:
                if not (ROOT / unquote(on_github[1].partition("#")[0])).exists():
                    broken.append((name, link))
            elif not urlsplit(link).scheme and not link.startswith("//"):
                file, _, anchor = link.partition("#")
                path = (
                    Path(os.path.normpath((site / name).parent / unquote(file.partition("?")[0])))
                    if file
                    else site / name
                )
                path = path / "index.html" if path.is_dir() else path
                if not path.is_relative_to(site) or not path.is_file():
                    broken.append((name, link))
                elif anchor and path.suffix == ".html":
                    ids = read[path.relative_to(site).as_posix()].ids
                    if unquote(anchor) not in ids:
                        broken.append((name, link))
    assert broken == []


@pytest.mark.slow
def test_the_site_shows_what_github_shows(read: dict[str, Read]) -> None:
    """GitHub's Markdown is CommonMark with tables. Where the site's dialect differs, a list could become a text."""
    commonmark = MarkdownIt("commonmark").enable("table")
    sources = {
        page.relative_to(ROOT / "docs").as_posix(): page
        for page in (ROOT / "docs").rglob("*.md")
        if page != ROOT / "docs" / "index.md"
    } | {place: ROOT / source for source, place in docs_site.PAGES.items()}
    differing = {}
    for place, source in sources.items():
        wanted = Read("<article>" + commonmark.render(source.read_text()) + "</article>").counts
        found = read[page_of(place)].counts
        if any(wanted[tag] != found[tag] for tag in COUNTED):
            differing[place] = {tag: (wanted[tag], found[tag]) for tag in COUNTED if wanted[tag] != found[tag]}
    assert differing == {}


@pytest.mark.slow
def test_the_search_finds_words_of_the_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"] if "SIGHUP" in entry["text"]}
    assert "guide/keys-and-limits/" in found


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    pattern = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)")
    loaded = {link for page in site.rglob("*.html") for link in pattern.findall(page.read_text())}
    assert {link for link in loaded if not link.startswith("https://llmserve.github.io/")} == set()  # canonical links


@pytest.mark.slow
def test_a_release_is_added_to_the_versions(site: Path, tmp_path: Path) -> None:
    """In a clone: its branch gh-pages has the site of the version, whose links lead to the version's tag."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: the files of an sdist have no history")
    clone, venv = tmp_path / "clone", Path(os.environ["DOCS_PYTHON"]).parents[1]
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(clone)], check=True)
    (clone / ".venv-docs").symlink_to(venv)
    (clone / "requirements" / "docs.lock").write_bytes(
        (venv / ".installed").read_bytes()
    )  # so that nothing is installed
    who = {f"GIT_{who}_{what}": "docs" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["scripts/docs", "version", "7.8.9"], cwd=clone, capture_output=True, text=True, env={**os.environ, **who}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "git push origin gh-pages"

    def branch(file: str) -> str:
        show = subprocess.run(
            ["git", "show", f"gh-pages:{file}"], cwd=clone, capture_output=True, text=True, check=True
        )
        return show.stdout

    assert json.loads(branch("versions.json")) == [{"version": "7.8.9", "title": "7.8.9", "aliases": ["latest"]}]
    page = branch("7.8.9/results/gpu/index.html")
    assert "/blob/v7.8.9/scripts/lab/gpu/README" in page
    assert "/blob/main/" not in page


# ---- links -----------------------------------------------------------------------------------------------------------


def test_links_out_of_docs_lead_to_the_sites_pages_or_to_github() -> None:
    guide = ROOT / "docs" / "guide" / "one-gpu.md"
    cases = {
        "../../README.md": "../index.md",
        "../index.md#papers-reproduced": "../contents.md#papers-reproduced",
        "../../CHANGELOG.md": "../changelog.md",
        "sglang.md#x": "sglang.md#x",
        "#x": "#x",
        "https://example.org/a.md": "https://example.org/a.md",
        "../results/scrape.json": "https://github.com/llmserve/llmserve/blob/main/docs/results/scrape.json",
        "../../scripts/lab/gpu/README": "https://github.com/llmserve/llmserve/blob/main/scripts/lab/gpu/README",
        "../../deploy": "https://github.com/llmserve/llmserve/tree/main/deploy",
    }
    assert {link: docs_site.target(link, guide, "guide") for link in cases} == cases


def test_links_of_the_readme_lead_to_pages_of_the_site() -> None:
    readme = ROOT / "README.md"
    assert docs_site.target("docs/guide/one-gpu.md#start", readme, "") == "guide/one-gpu.md#start"
    assert docs_site.target("docs/index.md", readme, "") == "contents.md"
    assert docs_site.target("docs/architecture.svg", readme, "") == "architecture.svg"


def test_brackets_in_code_are_no_links() -> None:
    text = "[a](../x.md) `[b](../x.md)`\n\n```\n[c](../x.md)\n```\n"
    assert docs_site.links(text) == ["../x.md"]


def test_every_page_has_a_place_in_the_navigation() -> None:
    entries = [entry for section in docs_site.navigation() for pages in section.values() for entry in pages]
    listed = [page for entry in entries for page in (entry.values() if isinstance(entry, dict) else [entry])]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*pages, *docs_site.PAGES.values()})
