"""Banned words in pages and messages, each with its replacement: the rules for texts that a program can check.

`make lint` runs this file. It reads the prose of the pages, their quotes of output (fences with `text`), docstrings and
comments, also of tests and benchmarks, and in kdist's source the string literals that contain a space: errors, log
lines, warnings and help texts. It does not read code blocks and inline code. If it finds something that is good
English, make the pattern narrower.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.environment import ROOT


class Word(NamedTuple):
    """A banned word, and the proof of its pattern: it finds `bad`, and nothing in `good`."""

    pattern: str  # whole words in any case
    instead: str
    bad: str
    good: str


_PEOPLE = (
    "people",
    "person",
    *("anyone", "anybody", "everyone", "everybody", "someone", "somebody", "those"),
    *(
        f"{noun}{s}"
        for noun in ("user", "author", "reader", "attacker", "maintainer", "colleague")
        for s in ("", "s")
    ),
)
_NO_PEOPLE = "".join(f"(?<!{noun} )" for noun in _PEOPLE)
_ALL_OF_A_KIND = (
    "workers|processes|devices|replicas|servers|tasks|machines|threads|strategies|backends|errors|files|logs|flags"
    "|variables|resolvers|messages|lines|names|pages"
)
_COUNTED = (
    "value|entry|entries|row|file|line|port|message|result|process|copy|copies|element|task|thread"
    "|collective|seed"
)
_RATE = "worker|machine|device|replica|process|step|epoch|batch|second|minute|GPU|core|host|task|server|node|pod|row"
_STOP = r"(?=[.,;:!?)|]|$| (?:and|or|for|in|on|with|to|by|as|at|from|if|when|where|is|are|was|that|which)\b)"

WORDS = (
    # Private metaphors.
    Word("folders?", "directory", "the folder of a run", "the directory of a run"),
    Word("mend(?:s|ed|ing)?", "fix", "what kdist mends", "recommended, amended"),
    Word("victims?", "name the worker", "the victim ends", "worker 1 ends"),
    Word("kin", "name them", "`broadcast` and its kin", "a kind, akin"),
    Word("(?<!-)houses?", "architecture", "the house of kdist", "a warehouse, in-house"),
    Word("rooms?(?! (?:for|to))", "package", "a room imports", "room for all workers"),
    Word("floors?(?! division)", "layer", "the floors below it", "floor division"),
    Word("roofs?", "the highest layer", "from the ground to the roof", "a proof"),
    Word("lifelines?", "the connection to the chief", "through kdist's lifeline", "a line"),
    # Spelling.
    Word(
        r"\w*(?:optim|initial|normal|serial|synchron|regular|recogn|parallel|vector|quant|organ|summar|minim|maxim|util"
        r"|special|general|custom|final|token|random|local|material|priorit)is(?:e|es|ed|er|ers|ing|ations?)",
        "-ize",
        "synchronised by the optimiser",
        "synchronized by the optimizer; optimistic, precise, promise",
    ),
    Word(
        r"\w*(?:colour|behaviour|neighbour|favour|honour)\w*",
        "-or",
        "colourless behaviour",
        "color, behavior, four",
    ),
    Word("catalogues?|centred?|centres|grey", "catalog, center, gray", "the centre", "the center"),
    # The noun is missing.
    Word("th(?:ose|at) of", "repeat the noun", "the loss is that of one device", "that often"),
    Word("those that", "name the noun", "those that train", "those workers"),
    Word(
        "the ones? (?:that|who|which|of)",
        "repeat the noun",
        "the one that failed",
        "the one worker that failed",
    ),
    Word("whoever", "name the noun", "whoever waits", "however"),
    Word(
        f"(?:of|on) (?:its|their|your|one's|his) own{_STOP}|of yours",
        "a custom X, a separate X, its X",
        "a callback of your own, or two",
        "the rows of its own replicas",
    ),
    # Only people do this.
    Word(
        f"{_NO_PEOPLE}whom?(?! connects)",
        "that, which, or the noun",
        "the worker who waits",
        "people who wait; who connects",
    ),
    Word("(?<!he )(?<!she )says", "contains, reports, shows, sets", "a file that says so", "she says"),
    Word("tells", "reports, shows, sets", "the log tells", "satellites"),
    Word(
        "(?<!you )(?:is|are|was|were|be|been) (?:told|said)",
        "receives, is reported",
        "each worker is told which GPU",
        "you are told",
    ),
    Word(
        "(?<!who )knows(?! the (?:secret|token)s?)",
        "has, contains, supports",
        "kdist knows the position",
        "anyone who knows it; a worker that knows the secret",
    ),
    Word(
        f"(?<!let )(?<!let the )(?:{_ALL_OF_A_KIND}) (?:say|tell|know)",
        "report, contain, have",
        "workers tell each other",
        "let the workers know",
    ),
    # Word order and small words.
    Word(
        "(?<!let )(?<!left )(?<!it )(?<!them )(?<!-)alone(?=[.,;:!?)|]|$)",
        "only, before the word",
        "JAX alone, and",
        "let alone, left alone.",
    ),
    Word(
        r"(?<=, )too(?=[.,;:!?)|]|$| (?:and|or|if|for|in|on|with|to)\b)",
        "also, before the word",
        "on TensorFlow, too",
        "large, too large; this is too",
    ),
    Word(
        "(?<!there )is no(?! (?:longer|more|less|better|worse|faster|slower|different))",
        "is not",
        "`size` is no number of elements",
        "there is no GPU, and it is no longer used",
    ),
    Word(
        rf"(?:(?:one|two|three|four|\d+|once|twice|rows|steps|images|batches|bytes|[KMG]i?B|times)"
        rf"|(?:an?|one|two|three|\d+|several|as many|more) (?:{_COUNTED})s?) an? (?:{_RATE})(?! \w+)",
        "per",
        "one entry a worker, rows a second",
        "rows per second; gives one a worker name",
    ),
    Word(
        r"(?-i:Where) (?!to\b)[^.,:;?!|]+,",
        "If, When",
        "Where nothing is set, one worker runs",
        "Where to go next, and the place where it is",
    ),
    # The usual word.
    Word(
        "(?:go|goes|went|gone) on|(?<!is )going on",
        "continue, resume",
        "training goes on",
        "what is going on",
    ),
    Word("st(?:and(?:s|ing)?|ood) still", "hang", "a worker that stands still", "it is still"),
    Word(
        "stands? (?:in|at|on|under|above|below|there|before|after|beside)",
        "is",
        "it stands at the start",
        "stands for",
    ),
    Word("at hand", "available", "no GPU was at hand", "by hand"),
    Word(
        "(?:numbers of one device|other numbers(?! of))",
        "results",
        "the numbers of one device",
        "other numbers of rows",
    ),
    Word("note that|(?<!not )simply", "leave it out", "Note that workers simply wait", "a note, not simply"),
    Word("nobody(?! sent)", "no worker, or the noun", "nobody waits", "a signal that nobody sent"),
    Word("anew|(?<!back and )forth", "again, forward", "compiled anew", "back and forth"),
)
IN_CODE = (
    Word(
        r"""(?<!not run `)pip install (?:-\S+ )*["']?kdist(?=[\["'`\s]|$)""",
        "pip install '.[…]' in a checkout: PyPI has no kdist",
        "pip install 'kdist[jax]'",
        "pip install '.[jax]', pip install dist/kdist-0.2.0-py3-none-any.whl, do not run `pip install kdist`",
    ),
)
# Output of other programs in fences with `text`: patterns of whole lines.
THIRD_PARTY: tuple[str, ...] = ()

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")),
]
PAGES += [ROOT / f"{name}.md" for name in ("CHANGELOG", "SECURITY")]
SOURCES = sorted((ROOT / "kdist").rglob("*.py"))
TESTS = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

_FENCE = re.compile(r"^ *(?:> *)?(```+|~~~+) *(\w*)")
_STARTS = re.compile(r" *(?:[-*|#>]|\d+\.|===|!!!|\?\?\?|:::)")
# Parts of a page that are not prose. A placeholder replaces inline code, so that the sentence stays whole.
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_NOT_TEXT = re.compile(r"\]\([^)\s]*\)|<!--.*?-->|</?\w[^>]*>|\{[^}]*\}|https?://[^\s)>]+", re.DOTALL)
# Examples in a docstring, and the names of its arguments.
_NOT_PROSE = re.compile(r"```.*?```|^ *(?:>>>|\.\.\.).*$|^ *\w+:(?= )", re.DOTALL | re.MULTILINE)


def find(words: tuple[Word, ...], text: str) -> Iterator[tuple[int, str, Word]]:
    """Yields the place of each banned word in a text, what was found, and the entry."""
    for word in words:
        for found in re.finditer(rf"(?<!\w)(?:{word.pattern})(?!\w)", text, re.IGNORECASE):
            yield found.start(), found[0], word


def blanked(text: str) -> str:
    """Returns a text of the same length without inline code, addresses and marks."""
    text = _CODE.sub(lambda code: "x" * len(code[0]), text)
    return _NOT_TEXT.sub(lambda mark: " " * len(mark[0]), text)


def paragraphs(page: str) -> Iterator[list[tuple[int, str]]]:
    """Yields the paragraphs of a page, as numbered lines, without code blocks; rows of tables are paragraphs."""
    lines: list[tuple[int, str]] = []
    fence = language = ""
    for number, line in enumerate(page.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence, language = ("", "") if fence else (mark[1], mark[2])
            line = ""
        elif fence:
            yield lines
            lines = []
            if language == "text" and not any(re.fullmatch(other, line.strip()) for other in THIRD_PARTY):
                yield [(number, line)]
            continue
        if not line.strip() or _STARTS.match(line):
            yield lines
            lines = []
        if line.strip():
            lines.append((number, line))
    yield lines


def findings_of_page(path: Path) -> Iterator[str]:
    """Yields the banned words of a page of Markdown, each with its line and its replacement."""
    page = path.read_text(encoding="utf-8")
    for lines in paragraphs(page):
        text, starts = "", []
        for _, line in lines:
            starts.append(len(text))
            text += line.strip() + " "
        for place, found, word in sorted(find(WORDS, blanked(text).rstrip())):
            yield _line(
                path, lines[bisect.bisect(starts, place) - 1][0], text[place : place + len(found)], word
            )
    for number, line in enumerate(page.splitlines(), start=1):
        for _, found, word in find(IN_CODE, line):
            yield _line(path, number, found, word)


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the strings of a module with a space in them, except docstrings, patterns and names of threads."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    if isinstance(tree, ast.Call) and ast.unparse(tree.func).startswith(("re.", "threading.Thread")):
        return
    if isinstance(tree, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "x" for part in tree.values]
        yield tree.lineno, "".join(parts)
        for part in tree.values:
            if isinstance(part, ast.FormattedValue):
                yield from literals(part.value)
        return
    if isinstance(tree, ast.Constant):
        if isinstance(tree.value, str) and " " in tree.value.strip():
            yield tree.lineno, tree.value
        return
    for child in ast.iter_child_nodes(tree):
        yield from literals(child)


def findings_of_source(path: Path) -> Iterator[str]:
    """Yields the banned words in messages and help texts of a module."""
    for number, text in literals(ast.parse(path.read_text(encoding="utf-8"))):
        for _, found, word in [*find(WORDS, blanked(text)), *find(IN_CODE, text)]:
            yield _line(path, number, found, word)


def comments_and_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields the docstrings without their examples and names of arguments, and the comments, a block at a time."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, _NOT_PROSE.sub(lambda code: "\n" * code[0].count("\n"), text)
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield last - len(block) + 1, "\n".join(block)
                block = []
            block.append(token.string)
            last = token.start[0]
    yield last - len(block) + 1, "\n".join(block)


def findings_of_comments(path: Path) -> Iterator[str]:
    """Yields the banned words in docstrings and comments of a module."""
    for number, text in comments_and_docstrings(path.read_text(encoding="utf-8")):
        for place, found, word in find(WORDS, blanked(text)):
            yield _line(path, number + text[:place].count("\n"), found, word)


def _line(path: Path, number: int, found: str, word: Word) -> str:
    return f"{path.relative_to(ROOT)}:{number}: {found!r}: {word.instead}"


@pytest.mark.parametrize("word", [*WORDS, *IN_CODE], ids=lambda word: word.bad)
def test_a_pattern_finds_what_is_banned_and_nothing_else(word: Word) -> None:
    table = IN_CODE if word in IN_CODE else WORDS
    assert word in [found for _, _, found in find(table, word.bad)]
    assert not [found for _, found, _ in find((word,), word.good)]


def _report(findings: list[str]) -> None:
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


def test_pages_have_no_banned_words() -> None:
    _report([line for page in PAGES for line in findings_of_page(page)])


def test_messages_and_help_texts_have_no_banned_words() -> None:
    _report([line for source in SOURCES for line in findings_of_source(source)])


def test_docstrings_and_comments_have_no_banned_words() -> None:
    _report([line for source in (*SOURCES, *TESTS) for line in findings_of_comments(source)])


def test_code_is_left_out_and_quotes_are_not() -> None:
    page = "The\nfolder `folder` [x](folder.md).\n\n```python\nfolder\n```\n\n- a\n  folder\n"
    page += "\n    ```text\n    folder\n    ```\n"
    lines = [
        number
        for paragraph in paragraphs(page)
        for number, line in paragraph
        for _ in find(WORDS, blanked(line))
    ]
    assert lines == [2, 9, 12]
    source = '''"""A folder."""
raise E(f"the folder {x}", "a"
  " folder", hint="folder", other="b folder", pattern=re.compile("a folder"))'''
    assert [number for number, text in literals(ast.parse(source)) if [*find(WORDS, text)]] == [2, 2, 3]
    source = '''"""A folder.

    Args:
        folder: One.

    >>> folder
    """
x = 1  # a folder'''
    texts = comments_and_docstrings(source)
    assert [
        number + text[:place].count("\n") for number, text in texts for place, *_ in find(WORDS, text)
    ] == [1, 8]
