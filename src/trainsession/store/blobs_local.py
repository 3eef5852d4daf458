"""Blobs in a local directory."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import BlobsUnavailable, StorageError
from .blobs import OWNER, Blob, Blobs, corrupt, is_name, new_name

_AWAY = frozenset({errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EMFILE, errno.ENFILE})
"""Of a network file system that is not there, and of a process with too many files open."""


class LocalBlobs(Blobs):
    """A directory (0700) of files (0600) named by the service, never by a user.

    Args:
        root: Made if missing.
    """

    concurrency = 2

    def __init__(self, root: Path) -> None:
        self.name = root.name
        self._root = root
        self._lock = threading.Lock()
        self._is_claimed = False
        """It has been seen to say whose blobs these are: a directory that does not is the one below a mount."""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _storage_error("cannot use the blob directory", error) from error

    def put(self, prefix: str, data: bytes) -> Blob:
        name = new_name(prefix)
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
            with suppress(OSError):
                aside.unlink()
            raise self._cannot("cannot store a blob", error) from error
        return Blob(name, hashlib.sha256(data).hexdigest(), len(data))

    def adopt(self, prefix: str, path: Path) -> Blob:
        """See `Blobs.adopt`; within a file system it is not copied."""
        name = new_name(prefix)
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
            with suppress(OSError):
                aside.unlink()
            raise self._cannot("cannot store a file", error) from error
        return Blob(name, digest, size)

    def get(self, name: str, sha256: str) -> bytes:
        try:
            data = (self._root / name).read_bytes()
        except OSError as error:
            raise self._cannot(f"cannot read blob {name}", error) from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise corrupt(name)
        return data

    def open(self, name: str, sha256: str) -> BinaryIO:
        try:
            file = (self._root / name).open("rb")
            try:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise corrupt(name)
                file.seek(0)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise self._cannot(f"cannot read blob {name}", error) from error
        return file

    def delete(self, name: str) -> None:
        try:
            (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise _storage_error(f"cannot delete blob {name}", error) from error

    def older_than(self, seconds: float) -> Iterator[str]:
        """See `Blobs.older_than`; also what a process that was killed left aside. What is younger another server
        may be writing."""
        limit = time.time() - seconds
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        is_ours = is_name(entry.name.removeprefix(".tmp-"))
                        if is_ours and entry.stat().st_mtime < limit:
                            yield entry.name
        except OSError as error:
            raise self._cannot("cannot list the blobs", error) from error

    def has(self, name: str) -> bool:
        return (self._root / name).exists()

    def owner(self) -> str | None:
        try:
            found = (self._root / OWNER).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _storage_error("cannot read whose blobs these are", error) from error
        self._is_claimed = True
        return found

    def claim(self, database: str) -> None:
        aside = self._root / f"{OWNER}-{secrets.token_hex(16)}"
        try:
            aside.write_text(database)
            try:
                os.link(aside, self._root / OWNER)
            except FileExistsError:
                return
            finally:
                aside.unlink()
        except OSError as error:
            raise _storage_error("cannot say whose blobs these are", error) from error

    def _cannot(self, what: str, error: OSError) -> StorageError:
        """What failed, and whether it may only be so now: a directory may be a mount, which comes and goes."""
        is_there = (self._root / OWNER).exists() if self._is_claimed else self._root.exists()
        if error.errno in _AWAY or (error.errno == errno.ENOENT and not is_there):
            return BlobsUnavailable(f"{what}: the directory of blobs cannot be reached now ({error.strerror})")
        return _storage_error(what, error)

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
