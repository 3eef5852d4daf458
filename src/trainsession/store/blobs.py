"""Blobs: bytes that are written once, checked on every read, never overwritten.

Their two sides are `blobs_local` (a directory) and `blobs_s3` (a bucket).
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, TypeAlias

from ..errors import InvalidRequest, StorageError

_BUCKET = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/(?P<prefix>[A-Za-z0-9._/-]{0,512}))?")


_NAME = re.compile(r"[a-z][a-z_-]*-[0-9a-f]{32}")
OWNER = ".owner"
"""Name of what says whose the blobs are."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Where bytes went; a row that refers to them keeps all three."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where blobs are in S3.

    Attributes:
        prefix: Of every key, without slashes at its ends; "" for none.
    """

    name: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}" if self.prefix else f"s3://{self.name}"


BlobsAddress: TypeAlias = Path | Bucket


class Blobs(ABC):
    """A store of blobs. Names are the service's own, never a user's. Any thread may use it."""

    name: str
    """How it is called in messages: never with credentials."""
    concurrency: ClassVar[int]
    """Calls that are worth running at once."""
    fsyncs: int = 0
    """So far, where it counts them."""

    @abstractmethod
    def put(self, prefix: str, data: bytes) -> Blob:
        """Store bytes durably under a new name.

        Raises:
            StorageError: it did not take them; no part of the blob can be read.
            BlobsUnavailable: it cannot be reached now. All of the blob may be there, under a name that nobody knows.
        """

    @abstractmethod
    def adopt(self, prefix: str, path: Path) -> Blob:
        """Take over a file of the home, durably; ``path`` is gone then."""

    @abstractmethod
    def get(self, name: str, sha256: str) -> bytes:
        """The bytes of a blob.

        Raises:
            StorageError: it is missing, or its bytes are not those that were written.
            BlobsUnavailable: the store cannot be reached now.
        """

    @abstractmethod
    def open(self, name: str, sha256: str) -> BinaryIO:
        """The blob as a file at its start, after all of it was verified; the caller closes it. Raises as `get`."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """One that is not there is no error."""

    @abstractmethod
    def older_than(self, seconds: float) -> Iterator[str]:
        """Names of blobs that were written more than ``seconds`` ago. What is not named like one is none of ours."""

    def forget_unfinished(self, seconds: float) -> None:
        """Remove what killed processes began to write more than ``seconds`` ago."""
        return

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a blob."""

    @abstractmethod
    def owner(self) -> str | None:
        """What `claim` was told first."""

    @abstractmethod
    def claim(self, database: str) -> None:
        """Say which database these belong to, unless it has been said: another would take all of them for garbage.

        Args:
            database: What tells it from all others.
        """


def parse_blobs(home: Path, blobs: str | None) -> BlobsAddress:
    """Where the blobs of a home are: a directory in it, or what an ``s3://`` address says.

    Args:
        blobs: ``s3://bucket/prefix``; None or "": the directory.

    Raises:
        InvalidRequest: not such an address. It is not repeated, as it may hold a secret.
    """
    if not blobs:
        return home / "blobs"
    match = _BUCKET.fullmatch(blobs)
    if match is None:
        raise InvalidRequest(
            "blobs: expected s3://bucket/prefix; credentials, region and endpoint come from the AWS settings "
            "(AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL_S3, a profile or a role)",
            details={"key": "blobs"},
        )
    return Bucket(match["bucket"], "/".join(filter(None, (match["prefix"] or "").split("/"))))


def blobs_of(address: BlobsAddress, scratch: Path) -> Blobs:
    """The side that an address belongs to; only what is used is imported.

    Args:
        scratch: Directory for files on their way to a reader; made when one is.

    Raises:
        StorageError: it cannot be used, or boto3 is not installed.
    """
    if isinstance(address, Path):
        from .blobs_local import LocalBlobs

        return LocalBlobs(address)
    try:
        from .blobs_s3 import S3Blobs
    except ModuleNotFoundError as error:
        raise StorageError(f"blobs in S3 need {error.name}: pip install 'trainsession[aws]'") from None
    return S3Blobs(address, scratch)


def new_name(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def is_name(name: str) -> bool:
    """Whether `new_name` may have made it."""
    return _NAME.fullmatch(name) is not None


def corrupt(name: str) -> StorageError:
    return StorageError(f"blob {name} is corrupt: its checksum differs", details={"blob": name})
