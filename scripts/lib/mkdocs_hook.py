"""A hook of MkDocs: pages that lie outside of docs/, and links that are good in the repository and on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site, and their files in the repository."""

FENCE = re.compile(r"^(```.*?^```)", flags=re.M | re.S)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _root(config: Any) -> Path:
    return Path(config.config_file_path).parent


def outside(root: Path) -> dict[str, str]:
    """`OUTSIDE`, and each kernel's page: "kernels/topk.md" is "cuda/topk/README.md"."""
    found = {}
    for file in sorted(root.glob("cuda/*/README.md")) + sorted(root.glob("cuda/*/sm*/README.md")):
        parts = file.relative_to(root).parts[1:-1]
        found[f"kernels/{'_'.join(parts)}.md"] = file.relative_to(root).as_posix()
    return OUTSIDE | found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    root = _root(config)
    for uri, source in outside(root).items():
        files.append(File.generated(config, uri, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the site's pages. What a link leads to elsewhere in the repository is named, not linked."""
    given = outside(_root(config))
    places = {source: uri for uri, source in given.items()}
    here = given.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def pointed(match: re.Match[str]) -> str:
        image, text, target, part = match[1], match[2], match[3], match[4] or ""
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        uri = places.get(place, place.removeprefix("docs/") if place.startswith("docs/") else "")
        file = files.get_file_from_path(uri) if uri else None
        if file is not None and file.inclusion.is_included():
            relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
            return f"{image}[{text}]({relative}{part})"
        name = posixpath.basename(place)
        return text if name in text else f"{text} (`{place}`)"

    pieces = FENCE.split(markdown)
    return "".join(piece if piece.startswith("```") else LINK.sub(pointed, piece) for piece in pieces)
