"""Takes the address of the site and the link to the repository from `[project.urls]` of pyproject.toml.

A hook of MkDocs. Without these addresses, the site has no canonical links and no link to the repository.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """MkDocs calls this before it builds."""
    return fill_in(config, tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"].get("urls", {}))


def fill_in(config: MkDocsConfig, urls: dict[str, str]) -> MkDocsConfig:
    """Sets the addresses of a site.

    Args:
        config: The configuration of MkDocs.
        urls: The entries of `[project.urls]`, of which `Documentation` and `Repository` are used.
    """
    if "Documentation" in urls:
        config.site_url = urls["Documentation"].rstrip("/") + "/"
    if "Repository" in urls:
        config.repo_url = urls["Repository"]
        config.repo_name = urlsplit(config.repo_url).path.strip("/")
    return config
