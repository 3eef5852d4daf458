"""Settings of a recipe: one frozen dataclass, filled from the command line or by a caller.

    @dataclass(frozen=True, kw_only=True)
    class Config(BaseConfig):
        steps: int = option(60, "optimizer steps")

    if __name__ == "__main__":
        command_line(main, Config, "arithmetic_rl", __doc__)

Every field is a flag (``group_size`` is ``--group-size``); a boolean field is a switch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import trainsession as ts

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

C = TypeVar("C", bound="BaseConfig")
T = TypeVar("T")
_OF_THE_SESSION = (ts.NotFound, ts.SessionClosed)
"""What a run that cannot be resumed here meets: another service's session, or one that has ended."""


class UsageError(ValueError):
    """What the caller gave cannot be used; the message says what can."""


def option(default: Any, help: str) -> Any:
    """A field with a default and the help text of its flag."""
    return field(default=default, metadata={"help": help})


def one_of(flag: str, name: str, choices: Mapping[str, T]) -> T:
    """The choice of that name.

    Raises:
        UsageError: there is none; names those that there are.
    """
    if name not in choices:
        raise UsageError(f"--{flag}: {name!r} is none of {', '.join(choices)}")
    return choices[name]


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The settings that every recipe has."""

    base_url: str | None = option(
        None, "a trainsession service; default: $TRAINSESSION_BASE_URL, else one in this process"
    )
    model: str = option(DEFAULT_MODEL, "base model: a hub name, or what `trainsession models` lists")
    data: str | None = option(None, "data file or directory in place of the recipe's own")
    steps: int = option(60, "optimizer steps")
    seed: int = option(0, "of the data split, LoRA's A, the batches and every sample")
    out: str | None = option(None, "directory of this run's files; default: runs/<recipe>-<time>")


@dataclass(frozen=True, kw_only=True)
class ResumableConfig(BaseConfig):
    """The settings of a recipe that goes on where it was stopped (`Run.open`)."""

    resume: str | None = option(None, "directory of an unfinished run: go on with it, all other settings are its own")
    smoke: bool = option(False, "a run of seconds with few small steps, on sums where no --data is given")


def command_line(
    main: Callable[[C], object],
    config: type[C],
    recipe: str,
    description: str | None,
    argv: Sequence[str] | None = None,
) -> None:
    """Run a recipe's ``main`` with settings from the command line (``argv``, default `sys.argv`).

    An error of the caller's making ends it with one line; any other shows where it came from.
    """
    settings = parse(config, f"python -m cookbook.{recipe}", description, argv)
    try:
        main(settings)
    except (UsageError, FileNotFoundError, ts.InvalidRequest, ts.ConnectionFailed, *_OF_THE_SESSION) as error:
        raise SystemExit(f"{recipe}: {error}") from None


def parse(config: type[C], prog: str, description: str | None, argv: Sequence[str] | None = None) -> C:
    """The settings that the flags in ``argv`` (default `sys.argv`) give."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(config)
    for item in fields(config):
        flag = "--" + item.name.replace("_", "-")
        text = item.metadata.get("help", "")
        if hints[item.name] is bool:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        shown = "" if item.default is None else f" (default: {item.default})"
        parser.add_argument(flag, type=_value_type(hints[item.name]), default=item.default, help=text + shown)
    return config(**vars(parser.parse_args(argv)))


def _value_type(hint: Any) -> Any:
    """``int`` for ``int`` and for ``int | None``."""
    return next((part for part in get_args(hint) if part is not NoneType), hint)
