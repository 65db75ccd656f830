"""What scripts write into docs/ is what they would write today."""

from __future__ import annotations

import pytest

from tests.pages import PAGES, ROOT


@pytest.mark.parametrize("path", PAGES)
def test_it_is_what_the_script_writes(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), "Write it anew: python -m tests.pages"
