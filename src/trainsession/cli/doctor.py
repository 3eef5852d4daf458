"""`trainsession doctor`: would a service work here, and what to do where it would not."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import typer

from ..errors import BlobsUnavailable, TrainSessionError
from ..transport.home import published
from .config import configured
from .output import AsJson, BlobsUrl, DatabaseUrl, Home, errors_as_exit, print_json, print_table

diagnosis = typer.Typer()

FREE_BYTES = 2**30
"""With less a service would soon be unable to keep snapshots and checkpoints."""
OLDEST_TIME = 1_767_225_600
"""2026-01-01: a clock before it was never set."""
AHEAD_SECONDS = 60
_BUSY_SECONDS = 5.0
_READY_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; ``do`` says what helps where it is not ``ok``."""

    check: str
    ok: bool
    found: str
    do: str = ""


@diagnosis.command()
def doctor(home: Home = None, database: DatabaseUrl = None, blobs: BlobsUrl = None, as_json: AsJson = False) -> None:
    """Check home, disk, database, blobs, prices, models, device and clock; exit status 1 if something is wrong.

    It leaves everything as it was, and may run beside a service.

    Example:

        trainsession doctor
    """
    with errors_as_exit():
        chosen = configured(home=home, database=database, blobs=blobs)
    where = chosen.home.absolute()
    elsewhere: dict[Callable[[Path], Finding], Callable[[Path], Finding]] = {}
    if chosen.database:
        elsewhere[check_database] = partial(check_database_server, address=chosen.database)
    if chosen.blobs:
        elsewhere[check_blobs] = partial(check_bucket, address=chosen.blobs)
    findings = [_checked(check, elsewhere.get(check, check), where) for check in CHECKS]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [asdict(finding) | {"ok": "ok" if finding.ok else "FAILED"} for finding in findings]
        print_table(rows, ("check", "ok", "found", "do"))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _checked(named: Callable[[Path], Finding], check: Callable[[Path], Finding], home: Path) -> Finding:
    try:
        return check(home)
    except Exception as error:  # a doctor looks at broken things: any of them is a finding
        said = error.message if isinstance(error, TrainSessionError) else f"{type(error).__name__}: {error}"
        name = named.__name__.removeprefix("check_").replace("_", " ")
        return Finding(name, False, said, "mend this, then run doctor again")


def check_home(home: Path) -> Finding:
    refused = _refuses_files(home)
    if refused is not None:
        return Finding("home", False, refused, "give --home or TRAINSESSION_HOME a directory of yours on a local disk")
    if home.exists() and home.stat().st_mode & 0o077:
        return Finding("home", False, f"{home} is open to other users of this machine", f"chmod 700 {home}")
    return Finding("home", True, str(home) if home.exists() else f"{home}, made on first use")


def check_disk(home: Path) -> Finding:
    free = shutil.disk_usage(_nearest(home)).free
    found = f"{free / 2**30:.1f} GiB free"
    return Finding("disk", free >= FREE_BYTES, found, "" if free >= FREE_BYTES else "free at least 1 GiB")


def check_database(home: Path) -> Finding:
    from ..store.backend import DATABASE_FILE, backend_of
    from ..store.schema import SCHEMA_VERSION
    from ..store.upgrade import schema_of

    path = home / DATABASE_FILE
    if not path.exists():
        return Finding("database", True, "none yet, made on first use")
    try:
        schema = schema_of(backend_of(path)) or "none"
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
            damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        locked = "locked" in str(error)
        do = "end the process that holds it" if locked else f"restore {path.name} from a backup, or use another home"
        return Finding("database", False, f"cannot be opened: {error}", do)
    if damage != "ok":
        return Finding("database", False, f"damaged: {damage}", f"restore {path.name} from a backup")
    if schema > SCHEMA_VERSION and schema != "none":
        newer = f"schema {schema}, this version knows {SCHEMA_VERSION}"
        return Finding("database", False, newer, "install the newer trainsession that wrote it, or use another home")
    upgrade = "" if schema == SCHEMA_VERSION else f", copied and upgraded to {SCHEMA_VERSION} when it is next opened"
    return Finding("database", True, f"schema {schema}{upgrade}")


def check_blobs(home: Path) -> Finding:
    refused = _refuses_files(home / "blobs")
    do = "" if refused is None else "make it writable for this user"
    return Finding("blobs", refused is None, refused or "writable", do)


def check_database_server(home: Path, address: str) -> Finding:
    """Writes a row, reads it back, and takes it away, in one transaction."""
    import sqlalchemy as sa

    from ..store.backend import backend_of, parse_address
    from ..store.schema import SCHEMA_VERSION, meta
    from ..store.upgrade import schema_of

    backend = backend_of(parse_address(home, address))
    key = f"doctor/{secrets.token_hex(8)}"
    engine = backend.engine("migrate")
    try:
        schema = schema_of(backend)
        if schema is None:
            return Finding("database", True, f"{backend.name}: empty, filled by the first command that uses it")
        if schema > SCHEMA_VERSION:
            newer = f"{backend.name}: schema {schema}, this version knows {SCHEMA_VERSION}"
            return Finding("database", False, newer, "install the newer trainsession that wrote it")
        if schema < SCHEMA_VERSION:
            return Finding("database", False, f"{backend.name}: schema {schema}", "trainsession db upgrade")
        with engine.begin() as connection:
            connection.execute(sa.insert(meta).values(key=key, value="probe"))
            found = connection.execute(sa.select(meta.c.value).where(meta.c.key == key)).scalar()
            connection.execute(sa.delete(meta).where(meta.c.key == key))
    except (*backend.errors, TrainSessionError) as error:
        said = error if isinstance(error, TrainSessionError) else backend.translate(error, "written")
        do = "start the server; correct the address, the user, its password (PGPASSWORD, ~/.pgpass) or its rights"
        return Finding("database", False, f"{backend.name}: {said}", do)
    finally:
        engine.dispose()
    if found != "probe":
        return Finding("database", False, f"{backend.name}: another value came back than was written", "restore it")
    return Finding("database", True, f"{backend.name}: schema {schema}, written and read")


def check_bucket(home: Path, address: str) -> Finding:
    """Writes an object, reads it back, and deletes it."""
    from ..store.blobs import blobs_of, parse_blobs

    try:
        blobs = blobs_of(parse_blobs(home, address), home / "tmp")
        blob = blobs.put("doctor", b"probe")
        blobs.get(blob.name, blob.sha256)
        blobs.delete(blob.name)
    except BlobsUnavailable as error:
        do = "start the store, or correct AWS_ENDPOINT_URL_S3, AWS_REGION and the network between"
        return Finding("blobs", False, error.message, do)
    except TrainSessionError as error:
        return Finding("blobs", False, error.message, "as it says; then run doctor again")
    return Finding("blobs", True, f"{blobs.name}: written, read and deleted")


def check_service(home: Path) -> Finding:
    import httpx

    location = published(home / "run")
    if location is None or not location.answers():
        return Finding("service", True, "none runs on this home")
    serves = f"process {location.pid} serves this home"
    with httpx.Client(transport=httpx.HTTPTransport(uds=location.socket), timeout=_READY_SECONDS) as client:
        checks: dict[str, bool] = client.get("http://trainsession/readyz").json()["checks"]
    failed = ", ".join(name for name, ok in checks.items() if not ok)
    if failed:
        return Finding("service", False, f"{serves}, and is not ready: {failed}", "its log holds the reason")
    return Finding("service", True, serves)


def check_prices(home: Path) -> Finding:
    from ..service.prices import PriceTable

    own = home / "prices.toml"
    if not own.exists():
        return Finding("prices", True, "the made-up examples of the package; yours go into prices.toml of the home")
    try:
        table = PriceTable.load(own)
    except ValueError as error:
        return Finding("prices", False, str(error), f"correct {own}")
    return Finding("prices", True, f"prices.toml, in {table.currency}, {len(table.models)} models of their own")


def check_model_cache(home: Path) -> Finding:
    from ..runtime.bundle import INSTALL_HINT, model_cache
    from ..runtime.catalog import Catalog

    cache = model_cache()
    refused = _refuses_files(cache)
    if refused is not None:
        return Finding("model cache", False, refused, "give TRAINSESSION_MODEL_CACHE a directory of yours")
    names = [model.name for model in Catalog(cache).list_base_models() if model.available]
    if not names:
        do = f"{INSTALL_HINT}, or put a Hugging Face directory into the cache"
        return Finding("model cache", False, f"{cache}: no model loads without a hub", do)
    return Finding("model cache", True, f"{cache}: {', '.join(names)}")


def check_engine(home: Path) -> Finding:
    try:
        from ..engine.model import default_mode
    except ImportError as error:
        return Finding("engine", False, f"{error.name} is not installed", "pip install 'trainsession[local]'")
    device, dtype, exact = default_mode()
    mode = "exact where the model allows it" if exact else "not exact: results depend on what shares a pass"
    return Finding("engine", True, f"{device}, {dtype}, {mode}")


def check_clock(home: Path) -> Finding:
    from ..store.backend import DATABASE_FILE

    now, shown = time.time(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    do = "set the clock (NTP): keys expire and usage is counted by it"
    if now < OLDEST_TIME:
        return Finding("clock", False, shown, do)
    path = home / DATABASE_FILE
    newest = 0.0
    if path.exists():
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sessions'").fetchone():
                newest = connection.execute("SELECT max(used_at) FROM sessions").fetchone()[0] or 0.0
    if newest > now + AHEAD_SECONDS:
        return Finding("clock", False, f"{shown}, {newest - now:.0f} s behind what the database has seen", do)
    return Finding("clock", True, shown)


CHECKS: tuple[Callable[[Path], Finding], ...] = (
    check_home,
    check_disk,
    check_database,
    check_blobs,
    check_service,
    check_prices,
    check_model_cache,
    check_engine,
    check_clock,
)


def _nearest(path: Path) -> Path:
    """The path, or the nearest directory above that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _refuses_files(directory: Path) -> str | None:
    """Why no file could be made in a directory, or in what it would be made in; None if one can."""
    there = _nearest(directory)
    if not there.is_dir():
        return f"{there} is no directory"
    if there != directory:
        return (
            None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable, so {directory} cannot be made"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{directory} cannot be written: {error.strerror}"
    return None
