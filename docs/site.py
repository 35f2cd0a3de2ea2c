"""Takes files of the repository's top into the site that mkdocs.yml describes: README.md is its first page.

Links between them and to docs/ work in a checkout and on the site alike.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TEXTS = ("LICENSE",)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files of docs/ and those of the top, whose links are as seen from docs/."""
    top = Path(config.config_file_path).parent
    for name in (*PAGES, *TEXTS):
        text = (top / name).read_text()
        files.append(File.generated(config, PAGES.get(name, name), content=_as_seen_from_docs(text)))
    return files


def _as_seen_from_docs(text: str) -> str:
    for name, page in PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    return re.sub(r"\]\(docs/", "](", text)
