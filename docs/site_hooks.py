"""Links from a page to files of the repository that lie outside docs/, made to work in the built site.

A picture is copied into the site. Any other file is named, and linked where mkdocs.yml has a `repo_url`.
A link to a file that is not there is a warning, which `mkdocs build --strict` fails for.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PICTURES = "examples/report"

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)+[^)\s#]*)[^)]*\)")
_log = logging.getLogger("mkdocs.hooks.autotune")


def on_files(files: Files, config: Any) -> Files:
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        place = f"pictures/{picture.name}"
        files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def linked(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", folder, match["target"]))
        if place.startswith("docs/"):
            return match[0]
        if not (ROOT / place).exists():
            _log.warning("%s links to %s, which is not there", page.file.src_uri, place)
        if posixpath.dirname(place) == PICTURES and place.endswith(".png"):
            inside = posixpath.relpath(f"pictures/{posixpath.basename(place)}", folder or ".")
            return f"{match['picture']}[{match['text']}]({inside})"
        if config.repo_url:
            address = f"{config.repo_url.rstrip('/')}/blob/main/{place}"
            return f"[{match['text']}]({address})"
        if match["text"].strip("`") == place:
            return f"`{place}`"
        return f"{match['text']} (`{place}`)"

    return _LINK.sub(linked, markdown)
