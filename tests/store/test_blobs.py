"""Blobs in a directory and in S3: written once, checked on every read, never overwritten."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.s3 import BUCKET, SECRET, BlobStores, S3Server, settings
from trainsession.errors import BlobsUnavailable, InvalidRequest, StorageError
from trainsession.store import blobs_s3
from trainsession.store.blobs import Blobs, Bucket, blobs_of, new_name, parse_blobs
from trainsession.store.blobs_local import LocalBlobs
from trainsession.store.store import Store

MANY = 6 * 2**20
"""Above the threshold that `few_bytes_are_many` sets."""


@pytest.fixture
def few_bytes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_s3, "MULTIPART_BYTES", 2**20)
    monkeypatch.setattr(blobs_s3, "PART_BYTES", 5 * 2**20)  # the smallest that S3 takes


def opened(stores: BlobStores, home: Path) -> Blobs:
    return blobs_of(parse_blobs(home, stores.address(home)), home / "tmp")


def read(blobs: Blobs, name: str, sha256: str) -> bytes:
    with blobs.open(name, sha256) as file:
        return file.read()


@pytest.mark.parametrize("size", [0, 10, MANY])
def test_what_was_put_or_adopted_comes_back(
    tmp_path: Path, each_blobs: BlobStores, few_bytes_are_many: None, size: int
) -> None:
    blobs, data = opened(each_blobs, tmp_path), os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    for blob in (blobs.put("body", data), blobs.adopt("checkpoint", tmp_path / "file")):
        assert (blob.sha256, blob.size) == (hashlib.sha256(data).hexdigest(), size)
        assert blobs.get(blob.name, blob.sha256) == read(blobs, blob.name, blob.sha256) == data
    assert not (tmp_path / "file").exists()
    assert len(each_blobs.names(tmp_path)) == 2
    assert not list((tmp_path / "tmp").glob("*"))


def test_what_was_changed_or_deleted_is_noticed(tmp_path: Path, each_blobs: BlobStores) -> None:
    blobs = opened(each_blobs, tmp_path)
    blob = blobs.put("body", b"some bytes")
    (each_blobs.directory(tmp_path) / blob.name).write_bytes(b"some bytez")
    for look in (blobs.get, blobs.open):
        with pytest.raises(StorageError, match="corrupt"):
            look(blob.name, blob.sha256)
    blobs.delete(blob.name)
    blobs.delete(blob.name)
    for look in (blobs.get, blobs.open):
        with pytest.raises(StorageError, match=blob.name) as caught:
            look(blob.name, blob.sha256)
        assert not caught.value.is_retryable()


def test_old_blobs_are_found(tmp_path: Path, each_blobs: BlobStores) -> None:
    blobs = opened(each_blobs, tmp_path)
    names = {blobs.put("body", b"x").name for _ in range(3)}
    blobs.claim("a database")
    assert set(blobs.older_than(60)) == set()
    assert set(blobs.older_than(-60)) == names


def test_a_directory_is_private_and_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    blob = blobs.put("body", b"some bytes")
    assert stat.S_IMODE((tmp_path / "blobs" / blob.name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blobs").stat().st_mode) == 0o700
    assert blobs.fsyncs == 2
    monkeypatch.setattr("trainsession.store.blobs.secrets.token_hex", lambda _: blob.name.removeprefix("body-"))
    with pytest.raises(StorageError):
        blobs.put("body", b"other bytes")
    assert blobs.get(blob.name, blob.sha256) == b"some bytes"


def test_what_a_killed_process_left_aside_is_garbage_once_it_is_old(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    blobs = LocalBlobs(root)
    half, being_written, foreign = (f".tmp-{new_name('body')}", f".tmp-{new_name('body')}", "notes.txt")
    for name in (half, being_written, foreign):
        (root / name).write_bytes(b"half")
    for name in (half, foreign):
        os.utime(root / name, (1.0, 1.0))
    LocalBlobs(root)  # another server that starts on the same directory
    assert list(blobs.older_than(3600.0)) == [half]
    blobs.delete(half)
    assert sorted(os.listdir(root)) == sorted([being_written, foreign])


def test_a_file_is_taken_over_from_another_file_system(tmp_path: Path) -> None:
    """The directory of blobs may be a mount that several servers share; what is written before is on a local disk."""
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    blobs = LocalBlobs(tmp_path / "blobs")
    with tempfile.TemporaryDirectory(dir=elsewhere) as directory:
        for path in (Path(directory) / "far", tmp_path / "near"):
            path.write_bytes(b"merged weights")
            blob = blobs.adopt("checkpoint", path)
            assert not path.exists()
            assert blobs.get(blob.name, blob.sha256) == b"merged weights"
            assert (tmp_path / "blobs" / blob.name).stat().st_mode & 0o777 == 0o600


def _claim(home: Path, used: set[str]) -> str:
    """By the database of a home; returns a blob that it wrote."""

    async def test() -> str:
        store = Store(home)
        try:
            await store.claim_blobs(lambda connection: used)
            return (await store.in_thread(store.blobs.put, "body", b"x")).name
        finally:
            await store.close()

    return asyncio.run(test())


def test_blobs_belong_to_one_database_and_a_database_to_its_blobs(tmp_path: Path) -> None:
    mine = _claim(tmp_path / "one", set())
    _claim(tmp_path / "one", {mine})
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "blobs").symlink_to(tmp_path / "one" / "blobs")
    with pytest.raises(StorageError, match="belong to another database"):
        _claim(tmp_path / "two", set())
    (tmp_path / "one" / "blobs").rename(tmp_path / "away")  # as when --blobs is forgotten
    with pytest.raises(StorageError, match="blobs of this database are elsewhere"):
        _claim(tmp_path / "one", {mine})
    (tmp_path / "one" / "blobs").rmdir()
    (tmp_path / "away").rename(tmp_path / "one" / "blobs")
    (tmp_path / "one" / "blobs" / ".owner").unlink()  # a home of before there were owners
    _claim(tmp_path / "one", {mine})


# --- S3 alone ------------------------------------------------------------------------------------


@pytest.fixture
def conditional(conditional_s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> blobs_s3.S3Blobs:
    """Blobs on a server that looks at ``If-None-Match``."""
    for name, value in settings(conditional_s3_server.url).items():
        monkeypatch.setenv(name, value)
    return blobs_s3.S3Blobs(Bucket(BUCKET, tmp_path.name), tmp_path / "tmp")


@pytest.mark.parametrize("size", [10, MANY])
def test_an_object_is_never_overwritten(
    conditional: blobs_s3.S3Blobs, few_bytes_are_many: None, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    data = os.urandom(size)
    blob = conditional.put("body", data)
    monkeypatch.setattr("trainsession.store.blobs.secrets.token_hex", lambda _: blob.name.removeprefix("body-"))
    with pytest.raises(StorageError, match="PreconditionFailed"):
        conditional.put("body", os.urandom(size))
    assert conditional.get(blob.name, blob.sha256) == data
    assert conditional.put("body", data) == blob  # as when an answer was lost and botocore sent it again


def test_uploads_that_a_killed_process_began_are_forgotten(
    conditional: blobs_s3.S3Blobs, conditional_s3_server: S3Server
) -> None:
    client = conditional_s3_server.client()
    client.create_multipart_upload(Bucket=BUCKET, Key=conditional._root + new_name("body"))
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{conditional._root}deeper/{new_name('body')}")
    client.create_multipart_upload(Bucket=BUCKET, Key="elsewhere/body-half")
    conditional.forget_unfinished(3600.0)  # to moto all of them are of 2010
    left = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert sorted(upload["Key"].split("/")[-2] for upload in left) == ["deeper", "elsewhere"]


def test_the_server_is_told_the_checksum_of_every_part(conditional: blobs_s3.S3Blobs, few_bytes_are_many: None) -> None:
    sent: list[tuple[str, dict[str, Any]]] = []
    events = conditional._client.meta.events
    events.register("before-call.s3", lambda model, params, **_: sent.append((model.name, params["headers"])))
    conditional.put("body", b"x" * 10)
    conditional.put("body", b"x" * MANY)
    puts = [(name, headers) for name, headers in sent if name in ("PutObject", "UploadPart")]
    assert [name for name, _ in puts] == ["PutObject", "UploadPart", "UploadPart"]
    assert all(headers["x-amz-checksum-sha256"] for _, headers in puts)
    for name, headers in sent:
        assert (headers.get("If-None-Match") == "*") == (name in ("PutObject", "CompleteMultipartUpload"))


def test_a_large_blob_is_not_held_twice(conditional: blobs_s3.S3Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    conditional._client.meta.events.register("before-call.s3.UploadPart", lambda **_: peaks.append(now()))
    peaks: list[int] = []

    def now() -> int:
        return tracemalloc.get_traced_memory()[0]

    data = bytes(100 * 2**20)
    tracemalloc.start()
    try:
        blob = conditional.put("body", data)
        assert max(peaks) < 2 * blobs_s3.PART_BYTES + 2**20
        tracemalloc.reset_peak()
        assert len(conditional.get(blob.name, blob.sha256)) == len(data)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(data)
        tracemalloc.reset_peak()
        with conditional.open(blob.name, blob.sha256):
            assert tracemalloc.get_traced_memory()[1] < 2 * blobs_s3.PART_BYTES + 2**20
    finally:
        tracemalloc.stop()


def test_blobs_of_another_database_are_left_alone(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings(s3_server.url).items():
        monkeypatch.setenv(name, value)
    here, elsewhere = (blobs_s3.S3Blobs(Bucket(BUCKET, f"{tmp_path.name}/{n}"), tmp_path) for n in ("a", "b"))
    for blobs in (here, elsewhere):
        assert blobs.owner() is None
        blobs.claim("one")
        blobs.claim("two")
        assert blobs.owner() == "one"
    here._client.put_object(Bucket=BUCKET, Key=f"{tmp_path.name}/a/dataset.tar", Body=b"somebody's")
    mine = here.put("body", b"x").name
    assert list(here.older_than(-3600.0)) == [mine]
    assert here.has(mine)
    assert not elsewhere.has(mine)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-and-never-shown"}, "SignatureDoesNotMatch.*s3:PutObject"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials.*AWS_ACCESS_KEY_ID"),
        ({"AWS_PROFILE": "none-such"}, "AWS settings|AWS_PROFILE"),
        ({"AWS_ENDPOINT_URL_S3": "none"}, "AWS_ENDPOINT_URL_S3"),
        ({"bucket": "none-such"}, "no such bucket.*--blobs"),
    ],
)
def test_settings_that_are_wrong_say_what_would_be_right(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    for name, value in (settings(s3_server.url) | change).items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises((StorageError, InvalidRequest), match=said) as caught:
        blobs_s3.S3Blobs(Bucket(change.get("bucket", BUCKET), "a/b"), tmp_path).put("body", b"x")
    assert not caught.value.is_retryable()
    text = str(caught.value.to_wire())
    assert "never-shown" not in text
    assert SECRET not in text


def test_a_server_that_is_not_there_is_tried_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    blobs, started = blobs_s3.S3Blobs(Bucket(BUCKET), tmp_path), time.monotonic()
    for call in (lambda: blobs.put("body", b"x"), lambda: blobs.get("x", ""), lambda: list(blobs.older_than(0))):
        with pytest.raises(BlobsUnavailable, match=f"s3://{BUCKET}: it cannot be reached now") as caught:
            call()
        assert caught.value.is_retryable()
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("address", "bucket"),
    [
        ("s3://a-bucket", Bucket("a-bucket")),
        ("s3://a-bucket/", Bucket("a-bucket")),
        ("s3://a.bucket/x//y/", Bucket("a.bucket", "x/y")),
        ("s3://key:secret-never@a-bucket/x", None),
        ("s3://A_Bucket", None),
        ("gs://a-bucket", None),
        ("s3://a-bucket/x?y", None),
        ("/a/directory", None),
    ],
)
def test_addresses(tmp_path: Path, address: str, bucket: Bucket | None) -> None:
    if bucket is not None:
        assert parse_blobs(tmp_path, address) == bucket
        return
    with pytest.raises(InvalidRequest, match="s3://bucket/prefix") as caught:
        parse_blobs(tmp_path, address)
    assert "never" not in str(caught.value)


def test_no_address_is_the_homes_directory(tmp_path: Path) -> None:
    assert parse_blobs(tmp_path, None) == parse_blobs(tmp_path, "") == tmp_path / "blobs"
