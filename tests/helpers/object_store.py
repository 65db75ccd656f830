"""An object store for tests, which several processes share: `shelf://bucket/run` after `register`."""

from __future__ import annotations

import datetime
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec


class StoreError(Exception):
    """An error as in a store's library: not an `OSError`."""


class ObjectStore(fsspec.AbstractFileSystem):
    """A store without directories, renames and appends. An object appears when its upload is complete.

    Each object is a file whose name is the quoted key. Listings are cached, as in the packages for real stores.
    """

    protocol = "shelf"
    root = Path()
    refuses = ""  # uploads of keys that contain it fail, if it is not empty
    reads: list[tuple[str, int | None, int | None]] = []  # noqa: RUF012
    removed: list[str] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listed: dict[str, list[dict[str, Any]]] = {}

    def file(self, path: str) -> Path:
        return self.root / "objects" / quote(self._strip_protocol(path), safe="")

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listed.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self._listed:
            self._listed[path] = list(self._list(path))
        found = self._listed[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def _list(self, path: str) -> Iterator[dict[str, Any]]:
        folders = set()
        for entry in sorted(os.scandir(self.root / "objects"), key=lambda entry: entry.name):
            key = unquote(entry.name)
            rest = key.removeprefix(f"{path}/" if path else "")
            if key == path or (rest != key and "/" not in rest):
                yield {"name": key, "size": entry.stat().st_size, "type": "file"}
            elif rest != key:
                folders.add(key.removesuffix(rest) + rest.partition("/")[0])
        for folder in sorted(folders):
            yield {"name": folder, "size": 0, "type": "directory"}

    def modified(self, path: str) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.file(path).stat().st_mtime, datetime.UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.reads.append((self._strip_protocol(path), start, end))
        return self.file(path).read_bytes()[start:end]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        assert mode == "wb", mode
        return _Upload(self, path)

    def rm_file(self, path: str) -> None:
        self.removed.append(self._strip_protocol(path))
        self.file(path).unlink()

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        raise NotImplementedError("a store has no directories")

    makedirs = mv = mv_file = rename = move = touch = mkdir


class _Upload(io.BytesIO):
    def __init__(self, store: ObjectStore, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            if self._store.refuses and self._store.refuses in self._path:
                super().close()
                raise StoreError(f"quota exceeded: {self._path}")
            part = self._store.root / f"upload-{os.urandom(8).hex()}"
            part.write_bytes(self.getvalue())
            os.replace(part, self._store.file(self._path))
        super().close()


def register(root: str | os.PathLike[str]) -> None:
    """Makes this process use the store in a directory."""
    (Path(root) / "objects").mkdir(parents=True, exist_ok=True)
    ObjectStore.root, ObjectStore.refuses = Path(root), ""
    ObjectStore.reads.clear()
    ObjectStore.removed.clear()
    fsspec.register_implementation("shelf", ObjectStore, clobber=True)


def keys(root: str | os.PathLike[str]) -> list[str]:
    """Returns the keys of all objects."""
    return sorted(unquote(entry.name) for entry in (Path(root) / "objects").iterdir())


def put(root: str | os.PathLike[str], key: str, data: bytes, hours_ago: float = 0.0) -> None:
    """Puts an object, as if it had been uploaded some hours ago."""
    file = Path(root) / "objects" / quote(key, safe="")
    file.write_bytes(data)
    at = time.time() - 3600 * hours_ago
    os.utime(file, (at, at))


def get(root: str | os.PathLike[str], key: str) -> bytes:
    """Returns the bytes of an object."""
    return (Path(root) / "objects" / quote(key, safe="")).read_bytes()


def age(root: str | os.PathLike[str], hours: float) -> None:
    """Makes all objects older."""
    for key in keys(root):
        put(root, key, get(root, key), hours)
