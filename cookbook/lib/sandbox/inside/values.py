"""Plain data and nothing else on a pipe, between a program and the tests that call it.

Runs inside. Types are exact on both ends: a subclass (a string whose `==` lies, a named tuple, a counter)
arrives as the plain value underneath, and anything else as a reference that stays opaque to the tests.
"""

import json
import math
import os
import struct

MAX_DEPTH = 100
BIG = 1 << 63
CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset}
TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}


class Malformed(Exception):
    """What came is no value, or too large a one."""


class Gone(Exception):
    """The other end is closed."""


def encode(value, refer, depth=0):
    """As JSON. `refer(value)` gives the JSON of what is no plain data."""
    if depth > MAX_DEPTH:
        raise Malformed(f"a value nested more than {MAX_DEPTH} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -BIG < number < BIG else {"int": hex(number)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, complex):
        number = complex.__complex__(value)
        return {"complex": [encode(part, refer) for part in (number.real, number.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, refer, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(part, refer, depth + 1) for part in item] for item in dict.items(value)]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer, depth + 1) for item in kind.__iter__(value)]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return refer(value)


def decode(data, refer, depth=0):
    """The value of `encode`'s JSON. Raises Malformed."""
    if depth > MAX_DEPTH:
        raise Malformed(f"a value nested more than {MAX_DEPTH} deep")
    if isinstance(data, list):
        return [decode(item, refer, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((kind, content),) = data.items()
        if kind in CONTAINERS:
            return CONTAINERS[kind](decode(item, refer, depth + 1) for item in content)
        if kind == "dict":
            return {decode(key, refer, depth + 1): decode(item, refer, depth + 1) for key, item in content}
        if kind == "complex":
            return complex(*(float(decode(part, refer)) for part in content))
        if kind == "int":
            return int(content, 16)
        return {"float": float, "bytes": bytes.fromhex, "type": TYPES.__getitem__, "ref": refer}[kind](content)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise Malformed(f"not a value: {error!r}") from None


class Channel:
    """Messages in JSON, each after its length, on two file descriptors."""

    def __init__(self, read_fd, write_fd, limit):
        self.read_fd, self.write_fd, self.limit = read_fd, write_fd, limit

    def send(self, message):
        data = json.dumps(message).encode()
        if len(data) > self.limit:
            raise Malformed(f"a value of {len(data)} bytes, at most {self.limit} are taken")
        data = memoryview(struct.pack("<I", len(data)) + data)
        while data:
            try:
                data = data[os.write(self.write_fd, data) :]
            except BrokenPipeError:
                raise Gone from None

    def receive(self):
        (length,) = struct.unpack("<I", self._read(4))
        if length > self.limit:
            raise Malformed(f"a value of {length} bytes, at most {self.limit} are taken")
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not a value: {error}") from None

    def _read(self, count):
        data = bytearray()
        while len(data) < count:
            piece = os.read(self.read_fd, count - len(data))
            if not piece:
                raise Gone
            data += piece
        return bytes(data)
