"""Blobs in a bucket of Amazon S3, or of a store that speaks its protocol.

An object appears whole or not at all (S3 has no half objects), never in place of another (``If-None-Match``), and
the store compares it with its SHA-256 before it takes it. Retries and their backoff are botocore's.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

from boto3.session import Session
from botocore import exceptions as aws
from botocore.config import Config
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError

from ..errors import BlobsUnavailable, InvalidRequest, StorageError
from .blobs import OWNER, Blob, Blobs, Bucket, corrupt, is_name, new_name
from .clock import earliest_now

MULTIPART_BYTES = 32 * 2**20
"""Above, an object is sent in parts, each with a checksum and retries of its own."""
PART_BYTES = 16 * 2**20
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 15.0
"""A store that says nothing for so long has failed this attempt."""
ATTEMPTS = 3
_CHUNK = 1 << 20
_FAULTS = (aws.BotoCoreError, aws.ClientError, ResponseParserError)
_AWAY = (aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, ResponseParserError)
_NOT_SAID = (aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError, aws.ProfileNotFound)
_LATER = ("BadDigest", "ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling")
"""Answers in the 400s to what may well succeed when it is sent again."""


class S3Blobs(Blobs):
    """Objects named ``<prefix>/<name>``. Credentials, region and endpoint come from the AWS settings.

    Args:
        scratch: Holds what is being read by `open`, in files without a name.
    """

    concurrency = 8

    def __init__(self, bucket: Bucket, scratch: Path) -> None:
        self.name = str(bucket)
        self._root = f"{bucket.prefix}/" if bucket.prefix else ""
        self._bucket = bucket.name
        self._scratch = scratch
        # Stores other than Amazon's are seldom reached as <bucket>.<host>.
        own = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=SILENCE_SECONDS,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=2 * self.concurrency,
            s3={"addressing_style": "path"} if own else None,
        )
        with self._faults("cannot use"):
            try:
                self._client: Any = Session().client("s3", config=config)
            except ValueError:
                raise InvalidRequest("AWS_ENDPOINT_URL_S3: expected https://host:port") from None
        # botocore reads forever when the connection ends within a "100 Continue"; so it does not ask for one.
        self._client.meta.events.unregister("before-call.s3", add_expect_header)

    def put(self, prefix: str, data: bytes) -> Blob:
        digest = hashlib.sha256(data).digest()
        name, view = new_name(prefix), memoryview(data)
        if len(data) <= MULTIPART_BYTES:
            self._store(name, digest, lambda key: self._put(key, data, digest))
        else:
            parts = (bytes(view[start : start + PART_BYTES]) for start in range(0, len(data), PART_BYTES))
            self._store(name, digest, lambda key: self._put_parts(key, parts))
        return Blob(name, digest.hex(), len(data))

    def adopt(self, prefix: str, path: Path) -> Blob:
        name = new_name(prefix)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                if size <= MULTIPART_BYTES:
                    self._store(name, digest, lambda key: self._put(key, file.read(), digest))
                else:
                    self._store(
                        name, digest, lambda key: self._put_parts(key, iter(lambda: file.read(PART_BYTES), b""))
                    )
            path.unlink()
        except OSError as error:
            raise StorageError(f"cannot read a file that should be stored: {error.strerror}") from error
        return Blob(name, digest.hex(), size)

    def get(self, name: str, sha256: str) -> bytes:
        target = io.BytesIO()
        self._download(name, target)
        data = target.getvalue()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise corrupt(name)
        return data

    def open(self, name: str, sha256: str) -> BinaryIO:
        try:
            self._scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Without a name: gone when it is closed, whatever happens to this process.
            file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 - the caller closes it
            try:
                self._download(name, file)
                file.seek(0)
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise corrupt(name)
                file.seek(0)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise StorageError(f"a blob on its way to its reader cannot be written: {error.strerror}") from error
        return file

    def delete(self, name: str) -> None:
        with self._faults(f"cannot delete blob {name} of"):
            self._client.delete_object(Bucket=self._bucket, Key=self._root + name)

    def older_than(self, seconds: float) -> Iterator[str]:
        with self._faults("cannot list the blobs of"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._root, Delimiter="/"
            )
            for page in pages:
                limit = _answered_at(page) - seconds
                for item in page.get("Contents", ()):
                    name = item["Key"].removeprefix(self._root)
                    if is_name(name) and item["LastModified"].timestamp() < limit:
                        yield name

    def forget_unfinished(self, seconds: float) -> None:
        with self._faults("cannot list the unfinished uploads of"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._root, Delimiter="/"
            )
            try:
                uploads = [(upload, _answered_at(page)) for page in pages for upload in page.get("Uploads", ())]
            except aws.ClientError as error:
                if _code(error) not in ("NoSuchUpload", "NotImplemented"):  # rclone has none; others cannot list them
                    raise
                return
        for upload, now in uploads:
            is_ours = is_name(upload["Key"].removeprefix(self._root))
            if is_ours and upload["Initiated"].timestamp() < now - seconds:
                self._abort(upload["Key"], upload["UploadId"])

    def has(self, name: str) -> bool:
        with self._faults("cannot use"):
            try:
                self._client.head_object(Bucket=self._bucket, Key=self._root + name)
            except aws.ClientError as error:
                if _code(error) not in ("404", "NoSuchKey", "NotFound"):
                    raise
                return False
        return True

    def owner(self) -> str | None:
        with self._faults("cannot use"):
            return self._owner()

    def claim(self, database: str) -> None:
        mark = database.encode()
        with self._faults("cannot use"):
            try:
                if self._owner() is None:
                    self._put(self._root + OWNER, mark, hashlib.sha256(mark).digest())
            except aws.ClientError as error:
                if _code(error) != "PreconditionFailed":
                    raise

    # --- inside ------------------------------------------------------------------------------

    def _owner(self) -> str | None:
        try:
            return self._client.get_object(Bucket=self._bucket, Key=self._root + OWNER)["Body"].read().decode()
        except aws.ClientError as error:
            if _code(error) != "NoSuchKey":
                raise
            return None

    def _store(self, name: str, digest: bytes, send: Callable[[str], None]) -> None:
        with self._faults("cannot store a blob in"):
            try:
                send(self._root + name)
            except aws.ClientError as error:
                # An answer was lost, and botocore sent again what the store had taken: then it is there.
                if _code(error) not in ("PreconditionFailed", "NoSuchUpload") or not self._is_there(name, digest):
                    raise

    def _put(self, key: str, data: bytes, digest: bytes) -> None:
        checksum = base64.b64encode(digest).decode()
        self._client.put_object(
            Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*", ChecksumSHA256=checksum, ContentLength=len(data)
        )

    def _put_parts(self, key: str, parts: Iterator[bytes]) -> None:
        where = {"Bucket": self._bucket, "Key": key}
        upload = self._client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")["UploadId"]
        try:
            done: list[dict[str, Any]] = []
            for number, part in enumerate(parts, 1):
                checksum = base64.b64encode(hashlib.sha256(part).digest()).decode()
                answer = self._client.upload_part(
                    **where, UploadId=upload, PartNumber=number, Body=part, ChecksumSHA256=checksum
                )
                done.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum})
            self._client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": done}, IfNoneMatch="*"
            )
        except BaseException:
            self._abort(key, upload)
            raise

    def _abort(self, key: str, upload: str) -> None:
        with suppress(*_FAULTS):  # it is finished, or forgotten later
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)

    def _download(self, name: str, file: BinaryIO) -> None:
        with self._faults(f"cannot read blob {name} of"):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._root + name)
            if "ContentLength" not in answer:  # its head was cut off, so nobody would notice it of its body
                raise aws.ResponseStreamingError(error="no content length")
            for chunk in answer["Body"].iter_chunks(_CHUNK):
                file.write(chunk)

    def _is_there(self, name: str, digest: bytes) -> bool:
        found = hashlib.sha256()
        for chunk in self._client.get_object(Bucket=self._bucket, Key=self._root + name)["Body"].iter_chunks(_CHUNK):
            found.update(chunk)
        return found.digest() == digest

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """Faults of the store, or of the way there, as ours. Their own texts stay out: they hold headers and keys."""
        try:
            yield
        except _FAULTS as error:
            raise self._translate(error, f"{what} {self.name}") from error

    def _translate(self, error: Exception, what: str) -> StorageError:
        if isinstance(error, _NOT_SAID):
            return StorageError(
                f"{what}: no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "AWS_PROFILE, or give the machine a role"
            )
        if isinstance(error, _AWAY):
            return BlobsUnavailable(f"{what}: it cannot be reached now ({type(error).__name__})")
        if not isinstance(error, aws.ClientError):
            return StorageError(f"{what}: the AWS settings are not right ({type(error).__name__})")
        code, status = _code(error), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        details = {"code": code}
        if status >= 500 or status in (409, 429) or code in _LATER or code.startswith("Throttling"):
            return BlobsUnavailable(f"{what}: it answered {status} {code}", details=details)
        if code == "NoSuchBucket":
            return StorageError(f"{what}: there is no such bucket; make it, or correct --blobs", details=details)
        if code in ("NoSuchKey", "404"):
            return StorageError(f"{what}: it is missing", details=details)
        if status == 403:
            return StorageError(
                f"{what}: it refused ({code}); the credentials must be valid there and may s3:GetObject, s3:PutObject, "
                "s3:DeleteObject, s3:AbortMultipartUpload, s3:ListBucket and s3:ListBucketMultipartUploads",
                details=details,
            )
        if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
            return StorageError(f"{what}: the bucket is in another region; set AWS_REGION to it", details=details)
        return StorageError(f"{what}: it answered {status} {code}", details=details)


def _answered_at(answer: Any) -> float:
    """By the store's own clock, which dates what it holds: this machine's may differ, or have been set."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return earliest_now() if date is None else parsedate_to_datetime(date).timestamp()


def _code(error: aws.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
