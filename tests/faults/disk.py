"""What a disk holds after a power loss, from a trace of what a process asked of it.

`library` compiles disk.c; a process that is started with `environment` writes down each write, sync and name below a
directory, and `control` is its end of the same. `Disk` plays a trace up to a place and says what may be left there:
a file is as it was when it was last synced, a name as when its directory was, and of what came later any part.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

Loss = Literal["all that was not synced", "nothing", "some"]
Kind = Literal["sync", "write"]
KINDS = get_args(Kind)
SECTOR = 512
_HEAD = struct.Struct("<cQQIQ")


def can_compile() -> bool:
    return sys.platform == "linux" and shutil.which("cc") is not None


def library(directory: Path) -> Path:
    made = directory / "disk.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl", "-lpthread"], check=True)
    return made


def environment(library: Path, home: Path, trace: Path | None = None) -> dict[str, str]:
    """For a process whose home that is."""
    own = {"LD_PRELOAD": str(library), "DISK_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {**os.environ, **own} | ({} if trace is None else {"DISK_TRACE": str(trace)})


class Control:
    """Of a process that was started with `environment`, over its own disk."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def mark(self, **what: Any) -> None:
        """Put it into the trace at this place."""
        text = json.dumps(what).encode()
        self._library.disk_mark(text, ctypes.c_uint64(len(text)))

    def refuse(self, what: Kind, first: int, until: int, code: int) -> None:
        """The syncs, or writes, from the ``first``-th from now on fail; the ``until``-th does not."""
        self._library.disk_refuse(KINDS.index(what), ctypes.c_long(first), ctypes.c_long(until), ctypes.c_int(code))

    def count(self, what: Kind) -> int:
        """Since the last `refuse`."""
        count = self._library.disk_count
        count.restype = ctypes.c_long
        return int(count(KINDS.index(what)))


@dataclass(frozen=True, slots=True)
class Record:
    """Attributes:
    what: m(ark), c(reate), w(rite), t(runcate), s(ync), l(ink), r(ename), u(nlink).
    """

    what: str
    inode: int
    offset: int
    path: str
    data: bytes


def records(trace: Path) -> Iterator[Record]:
    data, at = trace.read_bytes(), 0
    while at < len(data):
        what, inode, offset, length, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        path = data[at : at + length].decode()
        at += length
        yield Record(what.decode(), inode, offset, path, data[at : at + size])
        at += size


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data), or (length, None) of a truncation."""


_Rename = dict[str, _File | None]


class Disk:
    """Directories are there from the beginning; what is in them is not."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._inodes: dict[int, _File] = {}
        self._names: dict[str, _File] = {}
        self._synced: dict[str, _File] = {}
        self._unsynced: dict[str, list[_Rename]] = defaultdict(list)
        """By directory: which names were given, and taken away, in one step each."""
        self.marks: list[dict[str, Any]] = []

    def play(self, record: Record) -> None:
        path, data = record.path, record.data
        if record.what == "m":
            self.marks.append(json.loads(data))
        elif record.what == "c":
            self._inodes[record.inode] = made = _File()
            self._name({path: made})
        elif record.what == "w":
            file = self._inodes[record.inode]
            _write(file.content, record.offset, data)
            file.unsynced.append((record.offset, data))
        elif record.what == "t":
            file = self._inodes[record.inode]
            _cut(file.content, record.offset)
            file.unsynced.append((record.offset, None))
        elif record.what == "l":
            self._name({data.decode(): self._names[path]})
        elif record.what == "r":
            # What came from elsewhere (another file system) is not known here, and is written anew by whoever moves it.
            self._name({path: None, data.decode(): self._names[path]})
        elif record.what == "u":
            self._name({path: None})
        elif path in self._names:
            file = self._inodes[record.inode]
            file.synced, file.unsynced = bytes(file.content), []
        else:
            self._synced = {name: file for name, file in self._synced.items() if _parent(name) != path}
            self._synced |= {name: file for name, file in self._names.items() if _parent(name) == path}
            self._unsynced.pop(path, None)

    def leave(self, home: Path, loss: Loss, chance: random.Random) -> None:
        """Write to ``home`` what is left when the power goes now."""
        names = dict(self._names if loss == "nothing" else self._synced)
        if loss == "some":
            for steps in self._unsynced.values():
                for step in steps:
                    if chance.random() < 0.5:
                        _rename(names, step)
        for name, file in names.items():
            if name.endswith("-shm"):
                continue
            content = bytearray(file.content if loss == "nothing" else file.synced)
            if loss == "some":
                _tear(content, file.unsynced, chance)
            to = home / PurePosixPath(name).relative_to(self._home)
            to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            to.write_bytes(content)

    def _name(self, step: _Rename) -> None:
        _rename(self._names, step)
        self._unsynced[_parent(next(iter(step)))].append(step)


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _rename(names: dict[str, _File], step: _Rename) -> None:
    for name, file in step.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


def _cut(content: bytearray, length: int) -> None:
    del content[length:]
    content.extend(bytes(length - len(content)))


def _tear(content: bytearray, unsynced: list[tuple[int, bytes | None]], chance: random.Random) -> None:
    """Of each write: all, nothing, a beginning of any length, or some of its sectors."""
    for offset, data in unsynced:
        fate = chance.randrange(4)
        if data is None:
            if fate % 2:
                _cut(content, offset)
        elif fate == 0:
            _write(content, offset, data)
        elif fate == 1:
            _write(content, offset, data[: chance.randrange(len(data))])
        elif fate == 2:
            for at in range(0, len(data), SECTOR):
                if chance.random() < 0.5:
                    _write(content, offset + at, data[at : at + SECTOR])
