"""Changes good inputs into bad inputs, always the same for one seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

_BYTES = [
    b"\0",
    b"\xff" * 4,
    b"\0" * 8,
    b"\n",
    b"}",
    b"[" * 50,
    b'"',
    b"\xc3\x28",
    b"99999999999",
    b"-1",
    b"../",
    b"\x80\x04",
]
_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**70,
    -(2**63),
    1.5,
    float("inf"),
    float("nan"),
    "",
    "0",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "é" * 40,
    "9" * 30,
    "float32",
    "object",
    "V8",
    "a:1",
    "a:99999",
    "[::1]:1",
    "x" * 5000,
    [],
    {},
    [[]],
    [None] * 40,
    {"": []},
    [2**40],
    [0, 2**60],
    [-1],
    {"$tensor": "w"},
    {"$array": ["float64", [2**50], ""]},
    {"$tuple": 1},
    {"dict": [1]},
]
_TEXTS = [
    "",
    "0",
    "1",
    "2",
    "-1",
    "x",
    "h:1",
    "[::1]:1",
    "1:4",
    "[]",
    "{}",
    '["h"]',
    "9" * 12,
    " 1 ",
    ",",
    "a,a",
    "n[1-99999999]",
    "1(x99999999)",
    "../x",
    "/dev/zero",
    "/dev/stdin",
    "é",
    "\udcff",
    "[" * 2000,
    "a" * 10_000,
    "$(X)",
    "0x10",
    "1e9",
    "１",
]


def change_bytes(random: Random, good: bytes, others: Sequence[bytes]) -> bytes:
    """Flips, cuts, repeats, inserts and splices."""
    data = bytearray(good)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        kind = random.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[at : at + random.choice((1, 2, 8, 10_000))]
        elif kind == 2:
            data[at:at] = data[max(0, at - random.randrange(1, 40)) : at] * random.choice((1, 2, 100))
        elif kind == 3:
            data[at:at] = random.choice(_BYTES)
        elif kind == 4 and at < len(data):
            data[at] = random.randrange(256)
        else:
            other = random.choice(others)
            data[at:] = other[random.randrange(len(other) + 1) :]
    return bytes(data[:200_000])


def change_value(random: Random, good: Any) -> Any:
    """Replaces one or two nodes of a JSON value, sometimes with a very deep value."""
    root = [copy.deepcopy(good)]
    for _ in range(random.choice((1, 1, 2))):
        places = list(_places(root))
        holder, key = random.choice(places)
        kind = random.randrange(10)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 2:
            other, name = random.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif kind == 3 and isinstance(holder[key], int):
            holder[key] += random.choice((-1, 1, 8, 2**32, -(2**20)))
        else:
            holder[key] = copy.deepcopy(random.choice(_VALUES))
        if not root:
            return None
    return root[0]


def dump(random: Random, value: Any) -> bytes:
    """Writes a JSON value; 2% are nested more deeply than Python's parser supports."""
    text = json.dumps(value)
    if random.randrange(50) == 0:
        at = random.randrange(len(text) + 1)
        text = text[:at] + "[" * 3000 + text[at:]
    return text.encode("utf-8", "surrogatepass")


def change_environ(random: Random, good: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Drops, adds and changes variables."""
    environ = dict(good)
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice([*environ, random.choice(names)])
        kind = random.randrange(4)
        if kind == 0:
            environ.pop(name, None)
        elif kind == 1 and environ.get(name, "").startswith(("{", "[")):
            try:
                environ[name] = json.dumps(change_value(random, json.loads(environ[name])))
            except (ValueError, RecursionError):
                environ[name] = "{"
        elif kind == 2 and environ.get(name):
            text = environ[name].encode("utf-8", "surrogateescape")
            environ[name] = (
                change_bytes(random, text, [text]).replace(b"\0", b"").decode("utf-8", "surrogateescape")
            )
        else:
            environ[name] = random.choice(_TEXTS)
    return environ


def _places(node: Any) -> Any:
    items = enumerate(node) if isinstance(node, list) else node.items()
    for key, child in list(items):
        yield node, key
        if isinstance(child, (list, dict)):
            yield from _places(child)
