"""Commands of an operator: projects, API keys, the database. They work on the home's database itself,
whether or not a service runs there, and what they change is in force for its next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ..errors import InvalidRequest
from ..limits import PROJECT_LIMITS
from .config import configured
from .output import AsJson, DatabaseUrl, Home, errors_as_exit, print_json, print_rows, stderr

if TYPE_CHECKING:
    from ..service.budgets import Budgets
    from ..service.keys import Keys
    from ..service.projects import Projects

T = TypeVar("T")
PeriodName = Literal["total", "month"]
ScopeName = Literal["full", "sample", "read", "operator"]

_BUDGET = ("budget", "spent", "reserved", "left", "currency", "period", "resets_at")

projects = typer.Typer(help="Projects, what each may use at once, and what it may spend.", no_args_is_help=True)
keys = typer.Typer(help="API keys of projects.", no_args_is_help=True)
db = typer.Typer(help="The database of a home.", no_args_is_help=True)


@db.command("upgrade")
def upgrade_database(home: Home = None, database: DatabaseUrl = None) -> None:
    """Bring a database to the schema of this version; a file is copied first.

    Example:

        trainsession db upgrade --database postgresql://trainsession@db-host/trainsession
    """
    from ..store.backend import backend_of, parse_address
    from ..store.schema import SCHEMA_VERSION
    from ..store.upgrade import prepare

    with errors_as_exit():
        where = configured(home=home, database=database)
        backend = backend_of(parse_address(where.home.absolute(), where.database))
        before = prepare(backend, upgrade=True)
    change = f"at {SCHEMA_VERSION} already" if before == SCHEMA_VERSION else f"{before or 'empty'} -> {SCHEMA_VERSION}"
    stderr().print(f"schema of {backend.name}: {change}", markup=False, highlight=False)


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="1 to 128 of A-Z a-z 0-9 . _ -")],
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a project.

    Example:

        trainsession projects create alignment
    """
    project = _of_projects(home, database, lambda of: of.create(name))
    if as_json:
        print_json(project.to_wire())
    else:
        stderr().print(f"made project {name}; `trainsession keys create --project {name}` makes a key", markup=False)


@projects.command("list")
def list_projects(home: Home = None, database: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """List the projects, their limits and budgets.

    Example:

        trainsession projects list
    """
    found = _of_projects(home, database, lambda of: of.list(), create=False)
    budgets = _of_budgets(home, database, lambda of: of.all())
    none = dict.fromkeys(_BUDGET)
    of_project = {name: budget.to_wire() for name, budget in budgets.items()}
    if as_json:
        print_json([{**project.to_wire(), "budget": of_project.get(project.project)} for project in found])
    else:
        rows = [
            {"project": project.project, "created_at": project.created_at, **project.limits}
            | of_project.get(project.project, none)
            for project in found
        ]
        print_rows(rows, ("project", "created_at", *_BUDGET, *PROJECT_LIMITS), as_json)


@projects.command("set-budget")
def set_budget(
    project: Annotated[str, typer.Argument(help="Name of the project.")],
    amount: Annotated[str, typer.Argument(help="In the currency of the price table, for example 250 or 0.5.")],
    per: Annotated[
        PeriodName, typer.Option(help="total: of everything ever; month: of each calendar month (UTC).")
    ] = "total",
    currency: Annotated[str | None, typer.Option(help="Default: that of the home's price table.")] = None,
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Bound what a project may spend, in force at once: what runs ends, what does not fit any more is refused.

    Example:

        trainsession projects set-budget alignment 250 --per month
    """
    from ..service.prices import PriceTable

    with errors_as_exit():
        bound = _amount(amount)
        unit = currency or PriceTable.of_home(configured(home=home, database=database).home.absolute()).currency
    budget = _of_budgets(home, database, lambda of: of.set(project, bound, unit, per))
    if as_json:
        print_json({"project": project, **budget.to_wire()})
    else:
        print_rows([{"project": project, **budget.to_wire()}], ("project", *_BUDGET), as_json)


@projects.command("clear-budget")
def clear_budget(
    project: Annotated[str, typer.Argument(help="Name of the project.")],
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let a project spend without a bound again.

    Example:

        trainsession projects clear-budget alignment
    """
    had_one = _of_budgets(home, database, lambda of: of.clear(project))
    if as_json:
        print_json({"project": project, "cleared": had_one})
    else:
        stderr().print(f"project {project} has no budget{'' if had_one else ', and had none'}", markup=False)


@projects.command("set-limit")
def set_limit(
    project: Annotated[str, typer.Argument(help="Name of the project.")],
    settings: Annotated[list[str], typer.Argument(help=f"LIMIT=NUMBER or LIMIT=default; {', '.join(PROJECT_LIMITS)}")],
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change limits of a project, in force at once; `default` goes back to the service's own.

    Example:

        trainsession projects set-limit alignment max_live_sessions=8 max_tokens_per_minute=2000000
    """
    with errors_as_exit():
        changes = dict(_limit(setting) for setting in settings)
    changed = _of_projects(home, database, lambda of: of.set_limits(project, changes))
    if as_json:
        print_json(changed.to_wire())
    else:
        print_rows([{"project": project, **changed.limits}], ("project", *PROJECT_LIMITS), as_json)


@keys.command("create")
def create_key(
    project: Annotated[str, typer.Option(help="Whose key it is.")] = "default",
    scope: Annotated[
        ScopeName,
        typer.Option(
            help="full: everything; sample: draw samples; read: look at everything, change nothing; "
            "operator: metrics and usage of all projects, nothing in them."
        ),
    ] = "full",
    session: Annotated[str | None, typer.Option(help="Only samples of this session (scope sample).")] = None,
    name: Annotated[str, typer.Option(help="To tell keys apart.")] = "",
    days: Annotated[float | None, typer.Option(help="Valid for so many days; default: until revoked.")] = None,
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key and print it. It is shown this once: the home holds only its hash.

    Examples:

        trainsession keys create --project alignment --name laptop

        trainsession keys create --project alignment --scope sample --session s_... --days 1
    """
    key, listed = _of_keys(
        home,
        database,
        lambda of: of.create(
            project,
            scope="sample" if session is not None and scope == "full" else scope,
            session_id=session,
            name=name,
            valid_seconds=None if days is None else days * 86_400,
        ),
    )
    if as_json:
        print_json({"key": key, **listed.to_wire()})
    else:
        print(key)
        stderr().print(f"{listed.scope} key of project {project}; it cannot be shown again", markup=False)


@keys.command("list")
def list_keys(
    project: Annotated[str | None, typer.Option(help="Only those of this project.")] = None,
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the keys, by the part of each that may be shown.

    Example:

        trainsession keys list --project alignment
    """
    rows = [key.to_wire() for key in _of_keys(home, database, lambda of: of.list(project), create=False)]
    columns = ("prefix", "project", "name", "scope", "session_id", "created_at", "expires_at", "revoked_at")
    print_rows(rows, columns, as_json)


@keys.command("revoke")
def revoke_key(
    prefix: Annotated[str, typer.Argument(help="As in `trainsession keys list`: ts-<12 hex digits>")],
    home: Home = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from its next request on.

    Example:

        trainsession keys revoke ts-1c9e0b7a4f52
    """
    revoked = _of_keys(home, database, lambda of: of.revoke(prefix), create=False)
    if as_json:
        print_json(revoked.to_wire())
    else:
        stderr().print(f"revoked {revoked.prefix} of project {revoked.project}", markup=False)


# The database's packages are imported where a command needs them: the other commands start quicker.
def _of_projects(
    home: Path | None,
    database: str | None,
    work: Callable[[Projects], Coroutine[Any, Any, T]],
    *,
    create: bool = True,
) -> T:
    async def run() -> T:
        from ..service.projects import Projects
        from ..store.database import opened

        where = configured(home=home, database=database)
        async with opened(where.home.absolute(), where.database, create=create) as opening:
            return await work(Projects(opening))

    with errors_as_exit():
        return asyncio.run(run())


def _of_budgets(home: Path | None, database: str | None, work: Callable[[Budgets], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        from ..service.budgets import Budgets
        from ..store.database import opened

        where = configured(home=home, database=database)
        async with opened(where.home.absolute(), where.database, create=False) as opening:
            return await work(Budgets(opening))

    with errors_as_exit():
        return asyncio.run(run())


def _of_keys(
    home: Path | None,
    database: str | None,
    work: Callable[[Keys], Coroutine[Any, Any, T]],
    *,
    create: bool = True,
) -> T:
    async def run() -> T:
        from ..service.keys import Keys
        from ..store.database import opened

        where = configured(home=home, database=database)
        async with opened(where.home.absolute(), where.database, create=create) as opening:
            return await work(Keys(opening))

    with errors_as_exit():
        return asyncio.run(run())


def _amount(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise InvalidRequest(f"{text}: expected an amount of money, for example 250 or 0.5") from None


def _limit(setting: str) -> tuple[str, int | None]:
    name, _, value = setting.partition("=")
    if value == "default":
        return name, None
    if not value.isdecimal() or len(value) > 20:
        raise InvalidRequest(f"{setting}: expected LIMIT=NUMBER or LIMIT=default, for example max_live_sessions=8")
    return name, int(value)
