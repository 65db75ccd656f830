"""Writes all generated files in docs/: `python -m tests.pages`."""

from tests.pages.contents import PAGES, ROOT, content

for path in PAGES:
    (ROOT / path).write_bytes(content(path))
