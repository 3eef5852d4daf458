"""Blobs in a local directory: written once, checked on every read, never overwritten."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError


@dataclass(frozen=True, slots=True)
class Blob:
    """Where bytes went; a row that refers to them keeps all three."""

    name: str
    sha256: str
    size: int


class LocalBlobs:
    """A directory (0700) of files (0600) named by the service, never by a user.

    Args:
        root: Made if missing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.fsyncs = 0
        self._lock = threading.Lock()
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _storage_error("cannot use the blob directory", error) from error

    def put(self, prefix: str, data: bytes | memoryview) -> Blob:
        """Store bytes durably under a new name.

        Raises:
            StorageError: disk full or not writable; no part of the blob remains.
        """
        name = f"{prefix}-{secrets.token_hex(16)}"
        aside = self._root / f".tmp-{name}"
        try:
            descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(descriptor, view) :]
                self._fsync(descriptor)
            finally:
                os.close(descriptor)
            self._publish(aside, name)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise _storage_error("cannot store a blob", error) from error
        return Blob(name, hashlib.sha256(data).hexdigest(), len(data))

    def adopt(self, prefix: str, path: Path) -> Blob:
        """Take over a file, durably; ``path`` is gone then. Within a file system it is not copied."""
        name = f"{prefix}-{secrets.token_hex(16)}"
        aside = self._root / f".tmp-{name}"
        try:
            shutil.move(path, aside)  # the directory may be a mount of what several servers share
            aside.chmod(0o600)
            with aside.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                self._fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            self._publish(aside, name)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise _storage_error("cannot store a file", error) from error
        return Blob(name, digest, size)

    def get(self, name: str, sha256: str) -> bytes:
        """The bytes of a blob.

        Raises:
            StorageError: it is missing, or its bytes are not those that were written.
        """
        try:
            data = (self._root / name).read_bytes()
        except OSError as error:
            raise _storage_error(f"cannot read blob {name}", error) from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise StorageError(f"blob {name} is corrupt: its checksum differs", details={"blob": name})
        return data

    def path(self, name: str, sha256: str) -> Path:
        """The blob's file, for reading only, after its checksum was verified."""
        path = self._root / name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _storage_error(f"cannot read blob {name}", error) from error
        if digest != sha256:
            raise StorageError(f"blob {name} is corrupt: its checksum differs", details={"blob": name})
        return path

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def older_than(self, seconds: float) -> Iterator[str]:
        """Names of blobs that were written more than ``seconds`` ago; also what a process that was killed left aside.

        Not so for what is younger: another server may be writing it.
        """
        limit = time.time() - seconds
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.stat().st_mtime < limit:
                    yield entry.name

    def _publish(self, source: Path, name: str) -> None:
        """Give a synced file its name, unless the name is taken."""
        os.link(source, self._root / name)
        try:
            self._fsync_directory()
        except OSError:
            (self._root / name).unlink()
            raise
        source.unlink()

    def _fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        with self._lock:
            self.fsyncs += 1

    def _fsync_directory(self) -> None:
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._fsync(descriptor)
        finally:
            os.close(descriptor)


def _storage_error(what: str, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "; free some space and try again" if full else ""
    return StorageError(f"{what}: {error.strerror}{hint}", details={"errno": errno.errorcode.get(error.errno or 0, "")})
