"""`python -m tests.pages`: writes what scripts write into docs/."""

from tests.pages.contents import PAGES, ROOT, content

for path in PAGES:
    (ROOT / path).write_bytes(content(path))
