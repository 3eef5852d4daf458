"""A Jinja environment for chat templates of unknown origin: sandboxed, bounded in time and size.

A chat template is a program that comes with a model. Jinja's own sandbox keeps it away from Python's
internals, but not from `{% for a in range(99999) %}{% for b in range(99999) %}`. Here every loop
step, call, filter and operator also checks a budget, so that such a template ends in an error.

The names that a template sees (``raise_exception``, ``strftime_now``, ``tojson``, the
``{% generation %}`` tag, trimmed blocks) are those of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .tracing import MessageTrace

MAX_RENDERED_CHARS = 1 << 24
"""Characters that a template may make, in its output or in any one value."""
MAX_RENDER_SECONDS = 0.5
"""CPU seconds of the rendering thread."""
MAX_WIDTH = 100_000
"""The largest whole number that a text method or filter takes (a width, a count)."""
MAX_INTEGER_BITS = 256
_STEPS_PER_CLOCK_READ = 64
_HUGE_PERCENT_FORMAT = re.compile(r"%[^%a-zA-Z]*(\d{6}|\*)")
_HUGE_BRACE_FORMAT = re.compile(r"\{[^{}]*(\d{6}|\{)")
_TEXT_FILTERS = frozenset(
    (
        *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint"),
        *("replace", "safe", "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize"),
        *("wordcount", "wordwrap", "xmlattr"),
    )
)
"""Filters that make text of whatever they are given."""


class TemplateBudgetExceeded(Exception):
    """The template ran too long or made too much text."""


class Budget:
    """What one rendering may still use."""

    __slots__ = ("_deadline", "_steps")

    def __init__(self, seconds: float) -> None:
        self._deadline = time.thread_time() + seconds
        self._steps = 0

    def step(self) -> None:
        """A loop step: cheap, so that the clock is read for some of them only."""
        self._steps += 1
        if self._steps % _STEPS_PER_CLOCK_READ == 0:
            self.check()

    def check(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateBudgetExceeded(f"it ran longer than {MAX_RENDER_SECONDS} s")


_budget: ContextVar[Budget] = ContextVar("chat_template_budget")
_trace: ContextVar[MessageTrace] = ContextVar("chat_template_trace")


def _bounded(value: Any) -> Any:
    """The value itself, if it is not too large to go on with."""
    if isinstance(value, (str, list, tuple)):
        if len(value) > MAX_RENDERED_CHARS:
            raise TemplateBudgetExceeded(f"it made a value of more than {MAX_RENDERED_CHARS} items")
    elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise TemplateBudgetExceeded("it made a number that is too large")
    return value


def _check_growth(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise TemplateBudgetExceeded(f"it made a value of more than {MAX_RENDERED_CHARS} items")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0


def _items(value: Any) -> int:
    """Items of an iterable; the most that one can have where it does not say."""
    return _length(value) if isinstance(value, (str, list, tuple, dict, range)) else MAX_WIDTH


def _weigh(value: Any) -> None:
    """Walk a container before its text is made: shared parts (``[x, x]``, doubled 60 times) count each time."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (list, tuple, dict)):
            _budget.get().step()
            waiting.extend(part.values() if isinstance(part, dict) else part)


def _check_text_arguments(name: str, subject: Any, arguments: Iterable[Any]) -> None:
    """Refuse widths and products that a text method or filter would only notice when memory is gone."""
    values = list(arguments)
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateBudgetExceeded(f"{name} with {value}")
    if name == "replace" and len(values) >= 2:
        _check_growth((_length(subject) + 1) * (_length(values[1]) + 1))
    elif name == "join":
        _check_growth(_items(subject) * _items(values[0] if values else ""))
    elif name == "indent" and isinstance(subject, str):
        _check_growth((subject.count("\n") + 1) * max((_length(v) or int(v) for v in values if v), default=4))
    elif name == "format" and isinstance(subject, str):
        _check_width(subject, _HUGE_PERCENT_FORMAT)


def _check_width(text: str, huge: re.Pattern[str]) -> None:
    if huge.search(text):
        raise TemplateBudgetExceeded("a format with a huge width, or one that is computed")


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps jinja's pass_environment, pass_context and pass_eval_context marks
    def limited(*args: Any, **kwargs: Any) -> Any:
        _budget.get().check()
        skipped = 2 if hasattr(function, "jinja_pass_arg") else 1
        subject = args[skipped - 1] if len(args) >= skipped else None
        if name in _TEXT_FILTERS:
            _weigh(subject)
        _check_text_arguments(name, subject, [*args[skipped:], *kwargs.values()])
        return _bounded(function(*args, **kwargs))

    return limited


class _BoundLoops(NodeTransformer):
    """Route every loop and every ``~`` through the environment, where a budget is checked and messages are traced."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:
        self.generic_visit(node)
        node.iter = _environment_call("steps", [cast(nodes.Expr, node.iter)], node.lineno)
        if not isinstance(node.target, nodes.Name):
            return node
        self._loops += 1
        loop = nodes.Const(self._loops)
        item = nodes.Name(node.target.name, "load")
        node.body.insert(0, _statement(_environment_call("entered", [loop, item], node.lineno)))
        return [node, _statement(_environment_call("left", [loop], node.lineno))]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("concatenated", node.nodes, node.lineno)


def _environment_call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(lineno)
    return call


def _statement(call: nodes.Call) -> nodes.Node:
    """A call for its effect: it prints nothing, when what stands before it has been printed."""
    return nodes.Output([call]).set_lineno(call.lineno)


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant said; here it only passes through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_passed_through"), [], [], body).set_lineno(lineno)

    def _passed_through(self, caller: Macro) -> str:
        return caller()


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """See the module's docstring. Use `render`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        # Unoptimised: constant folding would run filters before there is a budget.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalized,
            extensions=[_GenerationTag, loopcontrols],
        )
        self.filters = {name: _limited_filter(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_DictFactory(),
            namespace=_TemplateNamespace,
        )
        # Compiling takes a hundred times as long as rendering.
        self._compiled = lru_cache(maxsize=64)(self.from_string)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _BoundLoops().visit(super()._parse(source, name, filename))

    def steps(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """The same items, each at the cost of one step."""
        return _Steps(iterable)

    def entered(self, loop: int, item: Any) -> str:
        _trace.get().enter(loop, item)
        return ""

    def left(self, loop: int) -> str:
        _trace.get().leave(loop)
        return ""

    def concatenated(self, *parts: Any) -> str:
        texts = [str(_finalized(part)) for part in parts]
        _check_growth(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().check()
        if operator == "*" and (_length(left) or _length(right)):
            _check_growth(max(_length(left), _length(right)) * max(_times(left), _times(right)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_growth(left.bit_length() * abs(right) * MAX_RENDERED_CHARS // MAX_INTEGER_BITS)
        elif operator == "%" and isinstance(left, str):
            _check_width(left, _HUGE_PERCENT_FORMAT)
            _weigh(right)
        return _bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().check()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_arguments(__obj.__name__, owner, [*args, *kwargs.values()])
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's sandboxed ``str.format``, with bounded widths."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            _check_width(str(value.__self__), _HUGE_BRACE_FORMAT)
            _weigh([*args, *kwargs.values()])
            return formatted(*args, **kwargs)

        return limited

    def render(
        self,
        source: str,
        variables: Mapping[str, Any],
        seconds: float = MAX_RENDER_SECONDS,
        trace: MessageTrace | None = None,
    ) -> str:
        """The rendered text; ``trace`` follows the messages that it is made of.

        Raises:
            TemplateBudgetExceeded: too slow or too large.
            jinja2.TemplateError: the template is wrong, or refused these messages by itself.
        """
        template = self._compiled(source)
        trace = trace or MessageTrace(())
        token, trace_token = _budget.set(Budget(seconds)), _trace.set(trace)
        try:
            parts: list[str] = []
            for part in template.generate(variables):
                _budget.get().step()
                trace.printed += len(part)
                _check_growth(trace.printed)
                parts.append(part)
            return "".join(parts)
        except MemoryError:
            raise TemplateBudgetExceeded("it ran out of memory") from None
        finally:
            _budget.reset(token)
            _trace.reset(trace_token)


class _Steps:
    """An iterable with its length, so that ``loop.length`` stays cheap."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            _budget.get().step()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # no length: TypeError, which jinja handles


class _DictFactory:
    """``dict`` without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A namespace that refuses names which begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace attribute cannot be called {name!r}")
        super().__setitem__(name, value)


def _finalized(value: Any) -> Any:
    """Applied to whatever a template writes out."""
    if isinstance(value, (list, tuple, dict)):
        _weigh(value)
    return value


def _times(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, written piece by piece within the budget."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts: list[str] = []
    size = 0
    for part in encoder.iterencode(value):
        _budget.get().step()
        size += len(part)
        _check_growth(size)
        parts.append(part)
    return "".join(parts)
