"""PyYAML reads the same values that kdist has written as YAML."""

import pytest
import yaml as pyyaml
from hypothesis import given
from hypothesis import strategies as st

from kdist.launch.manifest import yaml

# Any text except surrogates, which files cannot contain.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# Words that YAML readers take for other types, and characters that have a meaning in YAML.
TRICKY = st.sampled_from(
    ["yes", "No", "on", "OFF", "null", "Null", "~", "y", "n", "true", "1", "-1", "0x1f", "1e3", "1_000", ".inf",
     ".nan", "12:30:00", "2024-01-01", "<<", "=", "", " ", "- a", "a: b", "a #b", "#", "&a", "*a", "!a", "|", ">", "%a",
     "@a", "`a", "{", "[", "?", "---", "...", "'", '"', "\\", "a\nb", "a\r\nb", "\t", "\0", "\x85", "\u2028", "\ufeff",
     "\x7f", "None", "a-", "1a", "e1", "http://a:1/b"]
)  # fmt: skip
SCALARS = st.one_of(TEXT, TRICKY, st.integers(), st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | TRICKY, inner, max_size=3),
    max_leaves=12,
)


def alike(one, other):
    """Returns whether two values and their types are equal: in Python, 1 == True."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return not isinstance(one, list) or all(alike(*pair) for pair in zip(one, other, strict=True))


@given(VALUES)
def test_what_is_written_is_read(value):
    assert alike(pyyaml.safe_load(yaml.dump([value])), value), yaml.dump([value])


@given(st.lists(VALUES, min_size=2, max_size=3))
def test_several_in_one_file(values):
    assert alike(list(pyyaml.safe_load_all(yaml.dump(values))), values)


@pytest.mark.kills("manifest_words_not_quoted")
@pytest.mark.parametrize("text", ["y", "N", "1e3", "0o17", "1_000", "=", "<<"])
def test_words_that_mean_something_to_kubernetes_are_quoted(text):
    assert yaml.dump([{"value": text}]) == f'value: "{text}"\n'
