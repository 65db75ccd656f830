"""`python -m tests.pages`: writes what scripts write into docs/."""

from tests.pages.contents import PAGES, ROOT

for path, write in PAGES.items():
    (ROOT / path).write_text(write(), encoding="utf-8")
