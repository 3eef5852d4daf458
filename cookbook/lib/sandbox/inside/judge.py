"""Runs inside a sandbox of its own: the tests. The program is in another one, at the end of a pipe.

The names that tests call are stand-ins; a call sends plain data and gets plain data back. So the expected
values, the comparison and the verdict are in a process that the program's code never enters.

    judge.py SEED LIMIT UP SUITE REPLIES CALLS VERDICT
"""

import builtins
import json
import os
import random
import sys

from values import Channel, Gone, Malformed, decode, encode

# Raised where a test iterates over calls these would end the loop early, as if all had been well.
SILENT = ("StopIteration", "StopAsyncIteration")
# No errors, so a test that expects some error has not got it.
EXITS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit")


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class NotPlain(Exception):
    """A test looked into a value that is no plain data."""


class Program:
    """The other end."""

    def __init__(self, channel):
        self.channel = channel
        self.raised = None  # the last exception that came from the program
        self.verdict = None  # on the test that runs, whatever that test makes of it: it may catch everything
        self.lost = False  # nobody, or nobody who keeps to the protocol, is at the other end

    def ask(self, *request):
        return self.answer(encode(request, reference))

    def answer(self, request=None):
        """To a request; the first answer comes unasked, when the program is loaded."""
        try:
            if request is not None:
                self.channel.send(request)
            return self.read()
        except (Gone, Malformed) as error:
            self.lost = True
            self.verdict = ("crashed", "its process ended") if isinstance(error, Gone) else ("output", str(error))
            raise

    def read(self):
        reply = self.channel.receive()
        if type(reply) is dict and set(reply) == {"value"}:
            return decode(reply["value"], lambda number: Opaque(self, number))
        if type(reply) is dict and set(reply) == {"error", "text"}:
            name, text = str(reply["error"]), str(reply["text"])
            self.raised = exception(name, text)
            if name in EXITS:
                self.verdict = "error", f"{name}: {text}"
            raise self.raised
        raise Malformed("neither a value nor an error")


def exception(name, text):
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and name not in SILENT:
        try:
            return kind(text)
        except TypeError:  # a UnicodeDecodeError wants five arguments
            pass
    return ProgramError(f"{name}: {text}")


class Opaque:
    """Something in the program's process: to call, to pass back, to read attributes of; never to compare."""

    __slots__ = ("_number", "_program")

    def __init__(self, program, number):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", int(number))

    def __call__(self, *args, **kwargs):
        return self._program.ask("call", self, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("get", self, name)

    def __setattr__(self, name, value):
        self._program.ask("set", self, name, value)

    def _refuse(self, *_):
        said = "the program's value is no plain data (None, numbers, strings, lists, tuples, sets, dicts)"
        self._program.verdict = "output", said
        raise NotPlain(said)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse
    __iter__ = __len__ = __contains__ = __getitem__ = __int__ = __float__ = __index__ = __str__ = __repr__ = _refuse


class Lazy(Opaque):
    """A name of the program, looked up when it is used: it may be missing."""

    __slots__ = ("_name",)

    def __init__(self, program, name):
        super().__init__(program, 0)
        object.__setattr__(self, "_name", name)


def number_of(value):
    """Which object of the program."""
    if not isinstance(value, Lazy):
        return value._number
    try:
        found = value._program.ask("get", Opaque(value._program, 0), value._name)
    except AttributeError:
        raise ProgramError(f"the program has no {value._name}") from None
    if not isinstance(found, Opaque):
        raise ProgramError(f"the program's {value._name} is no function")
    return found._number


def reference(value):
    if isinstance(value, Opaque):
        return {"ref": number_of(value)}
    raise TypeError(f"a test passed a {type(value).__name__}; only plain data reaches a program")


def outcome(program, work):
    """What a piece of test code says of the program: an outcome and its reason."""
    program.verdict = None
    try:
        work()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if error is program.raised or isinstance(error, ProgramError):
            found = ("memory" if isinstance(error, MemoryError) else "error"), said
        else:
            found = "failed", said
    else:
        found = "passed", ""
    return program.verdict or found


def main():
    seed, limit, up, suite, replies, calls, verdict = (int(argument) for argument in sys.argv[1:])
    sys.path.pop(0)
    with open(suite, "rb") as file:
        tests = json.load(file)
    os.write(up, b"up")
    os.close(up)

    def report(kind, reason):
        os.write(verdict, json.dumps([kind, reason[:300]]).encode() + b"\n")

    program = Program(Channel(replies, calls, limit))
    names = {name: Lazy(program, name) for name in tests["names"]}
    for code in tests["tests"] if loads(program, report) else ():
        random.seed(seed)  # what one test draws does not depend on another
        scope = {"__name__": "tests", **names}

        def run(code=code, scope=scope):
            exec(compile(tests["setup"], "setup", "exec"), scope)
            exec(compile(code, "test", "exec"), scope)

        report(*outcome(program, run))
        if program.lost:
            return


def loads(program, report):
    """Whether the program can be called: its first message says so."""
    found = outcome(program, program.answer)
    if found[0] != "passed":
        report(*found)
    return found[0] == "passed"


if __name__ == "__main__":
    main()
