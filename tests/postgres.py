"""A real PostgreSQL server for a test run: its own directory, a Unix socket, a password."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

TEMPLATE = "migrated"


def missing() -> str | None:
    """Why no server can be started here; None if one can."""
    if _binaries() is None:
        return "no PostgreSQL server is installed (apt-get install postgresql)"
    try:
        import psycopg  # noqa: F401
    except ModuleNotFoundError:
        return "psycopg is not installed (pip install 'trainsession[postgres]')"
    return None


def _binaries() -> Path | None:
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(found, key=lambda path: int(path.parent.name), default=None)


class PostgresServer:
    """Runs until `stop`; every test has databases of its own."""

    def __init__(self) -> None:
        binaries = _binaries()
        assert binaries is not None
        self._binaries = binaries
        # Not within pytest's directory: as root the server runs as another user, who cannot enter that.
        self.directory = Path(tempfile.mkdtemp(prefix="trainsession-pg-"))
        self.password = secrets.token_hex(16)
        self._user: str | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            names = {entry.pw_name for entry in pwd.getpwall()}
            self._user = "postgres" if "postgres" in names else "nobody"
            shutil.chown(self.directory, self._user)
        secret = self.directory / "password"
        secret.write_text(self.password)
        if self._user is not None:
            shutil.chown(secret, self._user)
        options = ["--username=trainsession", "--auth=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8"]
        self._run("initdb", f"--pgdata={self.directory / 'data'}", "--locale=C", *options)
        self._count = 0
        self.start()

    def start(self) -> None:
        command = [self._binaries / "postgres", "-D", self.directory / "data", "-k", self.directory, "-h", ""]
        # Tests end processes, which loses nothing that was written; no test takes the machine's power away.
        command += ["-c", "fsync=off"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, user=self._user, cwd=self.directory, env={"LC_ALL": "C"}
            )
        for _ in range(300):
            try:
                self.execute("SELECT 1")
                return
            except OperationalError:
                time.sleep(0.1)
        raise RuntimeError((self.directory / "log").read_text())

    def crash(self) -> None:
        """As on a power failure: nothing is finished or written out."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)

    def stop(self) -> None:
        self.crash()  # to write out what is thrown away would take half a minute
        # Hundreds of databases of hundreds of files each: half a minute that nobody has to wait for.
        subprocess.Popen(["rm", "-rf", self.directory], start_new_session=True)

    def _run(self, name: str, *arguments: str) -> None:
        command: Sequence[str | Path] = [self._binaries / name, *arguments]
        subprocess.run(
            command, check=True, capture_output=True, user=self._user, cwd=self.directory, env={"LC_ALL": "C"}
        )

    def url(self, database: str) -> str:
        return f"postgresql://trainsession:{self.password}@/{database}?host={self.directory}"

    def execute(self, statement: str, database: str = "postgres", **values: Any) -> list[Any]:
        """The rows, if there are any; outside of any transaction."""
        engine = sa.create_engine(
            self.url(database).replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
        )
        try:
            with engine.connect() as connection:
                result = connection.execute(sa.text(statement), values)
                return list(result) if result.returns_rows else []
        finally:
            engine.dispose()

    def create(self, *, empty: bool = False) -> str:
        """URL of a new database, with the schema unless it should be empty."""
        self._count += 1
        name = f"test_{self._count}"
        if empty:
            self.execute(f"CREATE DATABASE {name}")
            return self.url(name)
        if not self.execute("SELECT 1 FROM pg_database WHERE datname = :name", name=TEMPLATE):
            self._migrate_template()
        self.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return self.url(name)

    def _migrate_template(self) -> None:
        from trainsession.store.backend import backend_of, parse_address
        from trainsession.store.upgrade import prepare

        self.execute(f"CREATE DATABASE {TEMPLATE}")
        prepare(backend_of(parse_address(Path(), self.url(TEMPLATE))))

    def terminate(self, url: str) -> int:
        """Cut all connections to a database, as an operator or a failover does; returns how many."""
        name = sa.make_url(url).database
        rows = self.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name", name=name)
        return len(rows)


class Databases:
    """The database of each home of one test: a file in it, or one of the server's."""

    def __init__(self, server: PostgresServer | None = None) -> None:
        self.server = server
        self._urls: dict[Path, str] = {}

    def url(self, home: Path) -> str | None:
        """None: the file."""
        if self.server is None:
            return None
        if home not in self._urls:
            self._urls[home] = self.server.create()
        return self._urls[home]
