"""API keys: who a caller is, and what of its project it may touch.

A key is ``ts-<12 hex>-<64 hex>``. The first part finds its row and may be shown; the second is 256
random bits. Only the SHA-256 of the whole is stored: of that many random bits a plain hash tells
nothing, and a slow one would only let strangers keep the service busy. Nothing is cached, so that a
revoked key is refused by the very next request to any process.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import sqlalchemy as sa

from ..errors import AuthenticationFailed, InvalidRequest, NotFound
from ..limits import LIMITS
from ..store.database import Database
from ..store.prepared import Prepared
from ..store.schema import api_keys, projects, sessions
from .projects import unknown_project

Scope = Literal["full", "sample", "read", "operator"]
"""Within its project ``full`` may do everything, ``read`` looks at everything and changes nothing, and
``sample`` draws samples and sees those, of one session only where the key is bound to it. ``operator``
is for whoever runs the service: its metrics and the usage of all projects, and nothing in any of them."""
SCOPES: tuple[Scope, ...] = ("full", "sample", "read", "operator")

MAX_VALID_SECONDS = 100 * 365.25 * 86_400
_KEY = re.compile(r"(ts-[0-9a-f]{12})-[0-9a-f]{64}")
_OF_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplesOf:
    """Restricts a call to samples, of one session or of all (None)."""

    session_id: str | None = None

    def hides(self, session_id: str | None) -> bool:
        """Whether this session does not exist for the caller; None stands for all sessions."""
        return self.session_id not in (None, session_id)


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is made."""

    project: str
    scope: Scope = "full"
    session_id: str | None = None
    """The one session that a ``sample`` key is bound to."""
    operator: bool = False
    """Whether it may see what is of the service as a whole."""

    @property
    def only(self) -> SamplesOf | None:
        """What its calls are restricted to within the project; None for nothing."""
        return SamplesOf(self.session_id) if self.scope == "sample" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it is listed: all but the key. Times are seconds since 1970."""

    prefix: str
    project: str
    name: str
    scope: Scope
    session_id: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


class Keys:
    """The keys of one database, which may be in use by a running service."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        project: str,
        *,
        scope: Scope = "full",
        session_id: str | None = None,
        name: str = "",
        valid_seconds: float | None = None,
    ) -> tuple[str, ApiKey]:
        """A new key, which nobody can read again, and how it is listed.

        Args:
            project: An existing one.
            session_id: Bind a ``sample`` key to one session of the project.
            name: Of your choice, to tell keys apart.
            valid_seconds: It expires after this; default: never.

        Raises:
            NotFound: no such project, or no such session in it.
            InvalidRequest, LimitExceeded: arguments that make no sense.
        """
        if scope not in SCOPES:
            raise InvalidRequest(f"scope: expected one of {', '.join(SCOPES)}, got {scope!r}", details={"key": "scope"})
        if session_id is not None and scope != "sample":
            raise InvalidRequest(
                f"session: only a key of scope sample can be bound to one, not {scope}", details={"key": "session"}
            )
        if valid_seconds is not None and not 0 < valid_seconds <= MAX_VALID_SECONDS:
            raise InvalidRequest(
                f"expiry: expected more than 0 and at most 100 years, got {valid_seconds:g} s",
                details={"key": "expiry"},
            )
        LIMITS.check("max_name_length", len(name), "name")
        prefix = f"ts-{secrets.token_hex(6)}"
        key = f"{prefix}-{secrets.token_hex(32)}"
        now = time.time()
        row = {
            "prefix": prefix,
            "project": project,
            "name": name,
            "scope": scope,
            "session_id": session_id,
            "created_at": now,
            "expires_at": None if valid_seconds is None else now + valid_seconds,
            "revoked_at": None,
        }

        def write(connection: sa.Connection) -> None:
            if connection.execute(sa.select(projects.c.id).where(projects.c.id == project)).first() is None:
                raise unknown_project(project)
            mine = sa.and_(sessions.c.id == session_id, sessions.c.project == project)
            if session_id is not None and connection.execute(sa.select(sessions.c.id).where(mine)).first() is None:
                raise NotFound(f"no session {session_id} in project {project}", details={"session_id": session_id})
            connection.execute(sa.insert(api_keys).values(**row, sha256=_hash(key)))

        await self._database.write(write)
        return key, ApiKey(**row)

    async def list(self, project: str | None = None) -> list[ApiKey]:
        """Oldest first, of one project or of all; revoked and expired ones included."""
        query = sa.select(*(column for column in api_keys.c if column.name != "sha256"))
        query = query.order_by(api_keys.c.created_at, api_keys.c.prefix)
        if project is not None:
            query = query.where(api_keys.c.project == project)
        rows = await self._database.read(lambda connection: connection.execute(query).mappings().all())
        return [ApiKey(**row) for row in rows]

    async def revoke(self, prefix: str) -> ApiKey:
        """Refuse a key from now on. A second time changes nothing.

        Raises:
            NotFound: no such key.
        """
        # Who has only the whole key at hand means the same, and it must not end up in an error.
        match = _KEY.fullmatch(prefix)
        prefix = match[1] if match else prefix
        mine = api_keys.c.prefix == prefix
        now = time.time()
        revoke = sa.update(api_keys).where(mine, api_keys.c.revoked_at.is_(None)).values(revoked_at=now)
        await self._database.write(lambda connection: connection.execute(revoke))
        found = [key for key in await self.list() if key.prefix == prefix]
        if not found:
            raise NotFound("no key has this prefix; `trainsession keys list` shows those that exist")
        return found[0]

    async def any_usable(self) -> bool:
        """Whether there is a key that opens anything now."""
        now = time.time()
        return any(key.revoked_at is None and (key.expires_at or now + 1) > now for key in await self.list())

    async def verify(self, key: str) -> Caller:
        """Who has this key; some tens of microseconds.

        Raises:
            AuthenticationFailed: it is not a key, not one of ours, revoked, or expired.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise AuthenticationFailed("this is no API key; keys look like ts-<12 hex digits>-<64 hex digits>")
        rows = await self._database.look_up(_FIND, {"of": match[1]})
        row: tuple[Any, ...] = rows[0] if rows else (_OF_NOBODY, None, None, None, None, None)
        sha256, project, scope, session_id, expires_at, revoked_at = row
        # An unknown prefix is compared, too, and answered like a wrong secret.
        if not hmac.compare_digest(sha256, _hash(key)) or not rows:
            raise AuthenticationFailed("this API key is not known here")
        if revoked_at is not None:
            raise AuthenticationFailed(f"the API key {match[1]} was revoked")
        if expires_at is not None and expires_at <= time.time():
            raise AuthenticationFailed(f"the API key {match[1]} has expired")
        return Caller(project, scope, session_id, operator=scope == "operator")


_FIND = Prepared(
    sa.select(
        api_keys.c.sha256,
        api_keys.c.project,
        api_keys.c.scope,
        api_keys.c.session_id,
        api_keys.c.expires_at,
        api_keys.c.revoked_at,
    ).where(api_keys.c.prefix == sa.bindparam("of"))
)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
