"""Builds the site in build/site by Zensical: `python -m docs.site`. Needs the extra `docs`, and no
network.

build/pages gets the pages of docs/, CONTRIBUTING and CHANGELOG, and the reference, which is made
from the program. Every link of the result is followed, and nothing may be loaded from elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs.reference import commands_page, files_page, python_page
from docs.tested import tested_page
from evener import __version__

REPO = Path(__file__).resolve().parents[1]
PAGES, SITE = REPO / "build/pages", REPO / "build/site"
CONFIG = REPO / "build/zensical.toml"  # that of the repository, with version and address
# Pages that the menu has and the search leaves out: logs of what was measured, and what is for
# those who change evener.
UNSEARCHED = ("benchmarks/", "changelog.html", "contributing.html", "reference/tested.html")
FIRST_PAGE = "index.html"  # its slogan, but not its parts
MOVED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "AGENTS.md": "agents.md",
    "README.md": "index.md",
}
MADE = {
    "reference/commands.md": commands_page,
    "reference/files.md": files_page,
    "reference/python.md": python_page,
    "reference/tested.md": tested_page,
}
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[#)])")  # to a file, from a page
LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


def stage(pages: Path = PAGES) -> None:
    """Fill the folder with every page and picture of the site."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(REPO / "docs", pages, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name, target in MOVED.items():
        if target != "index.md":
            shutil.copy(REPO / name, pages / target)
    origins = {
        pages / target: REPO / name for name, target in MOVED.items() if target != "index.md"
    }
    for page in sorted(pages.rglob("*.md")):
        origin = origins.get(page, REPO / "docs" / page.relative_to(pages))
        move = partial(_move, origin=origin, page=page, pages=pages)
        page.write_text(LINK.sub(move, page.read_text()))
    for name, make in MADE.items():
        (pages / name).parent.mkdir(exist_ok=True)
        (pages / name).write_text(make())


def write_config(config: Path = CONFIG) -> None:
    """The site's configuration, with the version that its pages are about, and with where the
    project lives if pyproject.toml says so.
    """
    text = (REPO / "zensical.toml").read_text()
    text = text.replace('site_name = "evener"', f'site_name = "evener {__version__}"', 1)
    text = text.replace('"build/', '"')
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    source = project.get("urls", {}).get("Source")
    if source:
        own = f'[project]\nrepo_url = "{source}"\nrepo_name = "Repository"'
        text = text.replace("[project]", own, 1)
    config.parent.mkdir(exist_ok=True)
    config.write_text(text)


def shorten_search(site: Path = SITE) -> None:
    """Leave out of the search's index what answers no question: it would come before how-tos."""
    index = json.loads((site / "search.json").read_text())
    index["items"] = [
        each
        for each in index["items"]
        if each["location"] != FIRST_PAGE and not each["location"].startswith(UNSEARCHED)
    ]
    found = json.dumps(index, separators=(",", ":"))
    script = (site / "search.js").read_text()
    name = script[: script.index("{")]
    (site / "search.json").write_text(found)
    (site / "search.js").write_text(f"{name}{found}")


def _move(found: re.Match[str], origin: Path, page: Path, pages: Path) -> str:
    """The link of a page whose place in the repository is `origin`; a file that is no page is put
    beside the pages.
    """
    target = Path(os.path.normpath(origin.parent / found[0]))
    if target.is_relative_to(REPO / "docs"):
        place = pages / target.relative_to(REPO / "docs")
    elif str(target.relative_to(REPO)) in MOVED:
        place = pages / MOVED[str(target.relative_to(REPO))]
    else:
        place = pages / "files" / target.relative_to(REPO)
        if target.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, place)
    return os.path.relpath(place, page.parent)


class _Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what the tag refers to, and its name."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", ""), given.get("name", "")}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if LOADING.get(tag) in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given[LOADING[tag]])


def find_faults(site: Path = SITE) -> Iterator[str]:
    """Dead links of the site, and what its pages load from elsewhere."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{path.relative_to(site)} loads {link}"
                continue
            target = (
                Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            )
            if path.name == "404.html":
                target = site / unquote(parts.path).lstrip("/")
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} isn't there"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link} has no such heading"


def main() -> int:
    """Stage, build and check; the exit code is 1 if a link is dead."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    write_config()
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run([*build, "--config-file", str(CONFIG)], cwd=REPO, check=True)
    shorten_search()
    faults = sorted(set(find_faults()))
    print("\n".join(faults), file=sys.stderr)
    print(f"{len(list(SITE.rglob('*.html')))} pages in build/site, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
