"""What `trainsession serve` is told, in one schema: a TOML file, then environment variables, then options.

Later ones win, value by value. The other commands of an operator take home, database and blobs from here, too, so that
all work on the same ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ..errors import InvalidRequest
from ..service.settings import Settings
from ..transport.home import default_home

DEFAULT_PORT = 8765
CONFIG_FILE = "config.toml"


PathOf = Annotated[Path, pydantic.AfterValidator(Path.expanduser)]


class ServeConfig(pydantic.BaseModel):
    """The keys of the file. A key's options and variables are `OPTIONS` and `VARIABLES`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    dev: bool = Field(False, description="without keys, on this machine only")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="port; 0 takes a free one")
    home: PathOf = Field(default_factory=default_home, description="where sessions and checkpoints live")
    database: str | None = Field(None, description="PostgreSQL URL; unset: a file in the home")
    blobs: str | None = Field(None, description="s3://bucket/prefix; unset: a directory in the home")
    advertise: str | None = Field(None, description="URL at which other servers on its database reach it")
    model_cache: PathOf | None = Field(None, description="local models; unset: `models` of `TRAINSESSION_HOME`")
    log_format: Literal["json", "text"] | None = Field(None, description="unset: text on a terminal, else json")
    service: Settings = Field(default_factory=Settings, description="times (in seconds) and bounds, a table")


VARIABLES = {
    "home": "TRAINSESSION_HOME",
    "database": "TRAINSESSION_DATABASE_URL",
    "blobs": "TRAINSESSION_BLOBS",
    "advertise": "TRAINSESSION_ADVERTISE",
    "model_cache": "TRAINSESSION_MODEL_CACHE",
    "log_format": "TRAINSESSION_LOG_FORMAT",
}
"""None for the address: Kubernetes gives TRAINSESSION_PORT and ..._SERVICE_... meanings of its own."""
OPTIONS = ("dev", "host", "port", "home", "database", "blobs", "advertise", "log_format")
_SERVICE = tuple(field.name for field in dataclasses.fields(Settings))


@dataclass(frozen=True, slots=True)
class Configuration:
    """Attributes:
    values: What is in force.
    sources: By key (``port``, ``service.idle_seconds``), where its value comes from.
    """

    values: ServeConfig
    sources: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """As TOML, with the source of each value; passwords are not in it."""
        for name in ServeConfig.model_fields:
            if name != "service":
                yield self._line(name, getattr(self.values, name), name)
        yield ""
        yield "[service]"
        for name in _SERVICE:
            yield self._line(name, getattr(self.values.service, name), f"service.{name}")

    def _line(self, name: str, value: Any, key: str) -> str:
        shown = f"# {name} =" if value is None else f"{name} = {_toml(_without_password(value, name))}"
        return f"{shown:<44}  # {self.sources.get(key, 'default')}"


def load(options: Mapping[str, Any], config: Path | None = None) -> Configuration:
    """What is in force, with these options of the command line (None: not given).

    Args:
        config: The file; default: ``$TRAINSESSION_CONFIG``, or ``config.toml`` in the home, where there is one.

    Raises:
        InvalidRequest: names the source, the key and what would be right. Values are not repeated: they may be secret.
    """
    given = {key: value for key, value in options.items() if value is not None}
    variables = {key: value for key, name in VARIABLES.items() if (value := os.environ.get(name))}
    home = Path(given.get("home") or default_home())
    named = config or (Path(value) if (value := os.environ.get("TRAINSESSION_CONFIG")) else None)
    path = named or home / CONFIG_FILE
    table = _read(path) if named is not None or path.exists() else {}
    if named is None and "home" in table:
        raise InvalidRequest(f"{path}: home: this file is in the home; give another with --home or TRAINSESSION_HOME")
    sources: dict[str, str] = {}
    for key, value in table.items():
        if key == "service":
            sources.update({f"service.{name}": str(path) for name in value})
        else:
            sources[key] = str(path)
    sources.update({key: VARIABLES[key] for key in variables})
    sources.update({key: f"--{key.replace('_', '-')}" for key in given})
    try:
        values = ServeConfig.model_validate({**table, **variables, **given})
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        source = sources.get(key, sources.get(key.partition(".")[0], str(path)))
        raise InvalidRequest(f"{source}: {key}: {first['msg']}", details={"key": key}) from None
    for name in _SERVICE:
        if getattr(values.service, name) <= 0:
            raise InvalidRequest(f"{path}: service.{name}: expected a number above 0", details={"key": name})
    return Configuration(values, sources)


def table() -> Iterator[str]:
    """The rows of the documentation's table."""
    for name, field in ServeConfig.model_fields.items():
        option = f"`--{name.replace('_', '-')}`" if name in OPTIONS else ""
        variable = f"`{VARIABLES[name]}`" if name in VARIABLES else ""
        yield f"| `{name}` | {option} | {variable} | {field.description} |"


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is no TOML: {error}") from None
    _check_known(path, "", found, tuple(ServeConfig.model_fields))
    service = found.get("service", {})
    if not isinstance(service, dict):
        raise InvalidRequest(f"{path}: service: expected a table, [service]")
    _check_known(path, "service.", service, _SERVICE)
    return found


def _check_known(path: Path, where: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            right = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(known)}"
            raise InvalidRequest(f"{path}: unknown key {where}{key}; {right}", details={"key": key})


def _without_password(value: Any, name: str) -> Any:
    if name != "database":
        return value
    import sqlalchemy as sa
    from sqlalchemy.exc import ArgumentError

    try:
        url = sa.make_url(value)
    except (ArgumentError, ValueError):
        return "***"
    if "password" in url.query:
        url = url.difference_update_query(["password"])
    return url.render_as_string(hide_password=True)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in escaped) + '"'
