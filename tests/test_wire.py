"""Bytes on the wire: exact round trips, and nothing that a hostile body can do."""

from __future__ import annotations

import math
import random
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainsession import (
    Datum,
    ForwardBackwardOutput,
    InvalidDatum,
    InvalidRequest,
    PayloadTooLarge,
    SampledSequence,
    SampleResponse,
    TensorData,
    Usage,
    wire,
)

arrays = st.sampled_from(["int64", "int32", "float32"]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(array=arrays)
def test_arrays_come_back_bit_for_bit(array: np.ndarray) -> None:
    back = wire.unpack(wire.pack({"x": array}))["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(array=arrays.filter(lambda array: array.ndim >= 2))
def test_order_and_strides_of_the_sender_do_not_matter(array: np.ndarray) -> None:
    for view in (np.asfortranarray(array), array.T, array[::2], array[..., ::-1]):
        back = wire.unpack(wire.pack(view))
        assert back.tobytes() == np.ascontiguousarray(view).tobytes()
        assert back.shape == view.shape


@given(value=plain)
def test_plain_values_come_back(value: Any) -> None:
    assert wire.unpack(wire.pack(value)) == value


def test_bytes_on_the_wire_are_little_endian() -> None:
    body = msgpack.unpackb(wire.pack(np.array([1, -2], dtype=np.int32)))
    assert body == {"dtype": "int32", "shape": [2], "bytes": struct.pack("<2i", 1, -2)}


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, dtype=np.float64),
        np.zeros(2, dtype=">f4"),
        np.array(["x"]),
        object(),
        {"x": {1, 2}},
        2**64,
        -(2**63) - 1,
        1j,
        "\ud800",
    ],
    ids=lambda value: type(value).__name__ if type(value) is object else repr(value),
)
def test_what_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        wire.pack(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        wire.pack(loop)


TENSOR = {"dtype": "float32", "shape": [2], "bytes": b"\0" * 8}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float64"},
        {"dtype": "object"},
        {"dtype": ["float32"]},
        {"dtype": None},
        {"shape": [3]},
        {"shape": [-1, -2]},
        {"shape": [2.0]},
        {"shape": "2"},
        {"shape": {}},
        {"shape": [1] * 9},
        {"shape": [2**40]},
        {"shape": [2**39, 2**39, 0]},
        {"shape": [0]},
        {"bytes": b""},
        {"bytes": "\0" * 8},
        {"bytes": [0] * 8},
    ],
    ids=lambda value: type(value).__name__ if type(value) is object else repr(value),
)
def test_a_tensor_must_fit_its_header(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        wire.unpack(msgpack.packb({"x": TENSOR | change}) or b"")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        wire.pack([1, 2])[:-1],
        wire.pack([1, 2]) + b"\0",
        b"\xa2\xff\xfe",
        b"\x81\x90\x01",
        b"\x91" * 100_000,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=lambda data: repr(data[:8]),
)
def test_broken_bodies_are_invalid_requests(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        wire.unpack(data)


@settings(max_examples=300)
@given(data=st.binary(max_size=64))
def test_any_bytes_unpack_or_are_refused(data: bytes) -> None:
    try:
        wire.unpack(data)
    except InvalidRequest:
        return


@settings(max_examples=200)
@given(array=arrays, cut=st.integers(0, 10**6), flip=st.integers(0, 10**6))
def test_damaged_bodies_unpack_or_are_refused(array: np.ndarray, cut: int, flip: int) -> None:
    data = bytearray(wire.pack({"data": [{"tokens": array, "inputs": {}}]}))
    data[flip % len(data)] ^= 1 << (flip % 8)
    try:
        wire.unpack(bytes(data[: len(data) - cut % 8]))
    except InvalidRequest:
        return


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux' /proc")
def test_a_nest_of_headers_reserves_no_memory() -> None:
    """Each five bytes claim a long list; a decoder that believed them would take gigabytes."""
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from trainsession import wire, InvalidRequest\n"
        "for claim in (b'\\xdd\\x01\\x00\\x00\\x00', b'\\xdd\\x00\\x02\\x00\\x00'):\n"
        "    try:\n"
        "        wire.unpack(claim * 500 + b'\\0' * (1 << 20))\n"
        "    except InvalidRequest as error:\n"
        # Not ru_maxrss: a child starts with its parent's.
        "        peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "        print(error, peak.split()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("MemoryError" not in line and int(line.split()[-1]) < 600_000 for line in lines)


def test_compressed_bodies_come_back() -> None:
    data = random.Random(0).randbytes(10_000) + b"\0" * 1_000_000
    assert len(wire.compress(data)) < 20_000
    assert wire.decompress(wire.compress(data)) == data
    assert wire.decompress(wire.compress(b"")) == b""
    assert wire.decompress(wire.compress(b"x" * 100), limit=100) == b"x" * 100


def test_a_compression_bomb_stops_at_the_limit() -> None:
    bomb = wire.compress(b"\0" * (64 << 20))
    assert len(bomb) < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    with pytest.raises(PayloadTooLarge, match="1048576 bytes"):
        wire.decompress(bomb, limit=1 << 20)
    assert time.thread_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32_000


def test_a_frame_that_lies_about_its_size_or_window_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.decompress(b"not zstd at all")
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=29, enable_ldm=True)
    ).compressobj()
    with pytest.raises(InvalidRequest):
        wire.decompress(wide.compress(random.Random(0).randbytes(1000)) + wide.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(ids=tokens, weights=st.booleans(), temperature=st.none() | st.floats(0.125, 2.0, width=32))
def test_datums_come_back(ids: list[int], weights: bool, temperature: float | None) -> None:
    inputs: dict[str, Any] = {"target_tokens": ids}
    if weights:
        inputs["weights"] = [0.5] * len(ids)
    if temperature is not None:
        inputs["temperature"] = temperature
    data = [Datum(ids, inputs), Datum([], {})]
    assert wire.datums_from_wire(wire.unpack(wire.pack(wire.datums_to_wire(data)))) == data


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "expected a list of datums"),
        (None, "expected a list of datums"),
        ([3], "datum 0: expected the keys"),
        ([{"tokens": [1], "inputs": {}}, {"tokens": [1]}], "datum 1: expected the keys"),
        ([{"tokens": [1], "inputs": {}, "more": 1}], "datum 0: expected the keys"),
        ([{"tokens": [1], "inputs": []}], "datum 0: expected the keys"),
        ([{"tokens": [[1], [1, 2]], "inputs": {}}], "datum 0: ModelInput: expected a flat sequence"),
        ([{"tokens": "abc", "inputs": {}}], "datum 0: ModelInput"),
        ([{"tokens": [1.5], "inputs": {}}], "datum 0: ModelInput"),
        ([{"tokens": [-1], "inputs": {}}], "datum 0: ModelInput: token id -1"),
        ([{"tokens": [1], "inputs": {"weights": ["x"]}}], r"datum 0: loss_fn_inputs\['weights'\]"),
        ([{"tokens": [1], "inputs": {"weights": [[1], [1, 2]]}}], r"datum 0: loss_fn_inputs\['weights'\]"),
        ([{"tokens": [1], "inputs": {"weights": {"a": 1}}}], r"datum 0: loss_fn_inputs\['weights'\]"),
        ([{"tokens": [1], "inputs": {"target_tokens": [0.5]}}], r"datum 0: loss_fn_inputs\['target_tokens'\]"),
    ],
)
def test_bad_datums_name_the_datum_and_the_key(body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        wire.datums_from_wire(body)


def test_a_bad_input_keeps_its_class_and_details() -> None:
    body = [{"tokens": [1], "inputs": {}}, {"tokens": [1], "inputs": {"weights": ["x"]}}]
    with pytest.raises(InvalidDatum) as caught:
        wire.datums_from_wire(body)
    assert caught.value.details == {"datum": 1, "key": "weights"}


def test_outputs_come_back() -> None:
    output = ForwardBackwardOutput(
        [{"logprobs": TensorData([-1.5, -0.25])}, {"logprobs": TensorData(np.zeros((0, 3), dtype=np.float32))}],
        {"loss:sum": 1.75, "ratio:max": math.inf},
        Usage(train=5, cost=0.25),
    )
    assert wire.output_from_wire(wire.unpack(wire.pack(wire.output_to_wire(output)))) == output


def test_an_answer_of_a_newer_service_is_read() -> None:
    body = wire.output_to_wire(ForwardBackwardOutput([], {}, Usage(train=5)))
    body = wire.unpack(wire.pack(body | {"usage": {**body["usage"], "embed": 7}, "more": 1}))
    assert wire.output_from_wire(body).usage == Usage(train=5)


def test_samples_come_back() -> None:
    sequence = SampledSequence(
        [4, 2],
        [-0.5, -0.125],
        "stop",
        "é",
        [[(4, -0.5), (3, -1.5)], [(2, -0.125), (9, -math.inf)]],
    )
    response = SampleResponse([sequence], [None, -0.5], [None, [(1, -0.25)]], Usage(prefill=2, sample=2))
    back = wire.samples_from_wire(wire.unpack(wire.pack(wire.samples_to_wire(response))))
    (got,) = back.sequences
    assert got.tokens == [4, 2]
    assert got.logprobs == [-0.5, -0.125]
    assert [7, 8, *got.tokens] == [7, 8] + got.tokens, "joined, not added as arrays would be"  # noqa: RUF005
    assert (got.stop_reason, got.text, got.topk_logprobs) == ("stop", "é", sequence.topk_logprobs)
    assert back.prompt_logprobs == [None, -0.5]
    assert back.topk_prompt_logprobs == [None, [(1, -0.25)]]
    assert back.usage == response.usage


def test_samples_without_logprobs_or_tokens_come_back() -> None:
    empty = SampledSequence([], [], "length")
    back = wire.samples_from_wire(wire.unpack(wire.pack(wire.samples_to_wire(SampleResponse([empty])))))
    assert (back.sequences[0].tokens, back.sequences[0].logprobs) == ([], [])
    assert back.sequences[0].topk_logprobs is None
    assert back.prompt_logprobs is None
    assert back.topk_prompt_logprobs is None


def test_a_nan_prompt_logprob_is_not_hidden() -> None:
    """Only the first token has none; a NaN elsewhere is a fault that must be seen."""
    response = SampleResponse([], [None, math.nan, -1.0])
    back = wire.samples_from_wire(wire.unpack(wire.pack(wire.samples_to_wire(response)))).prompt_logprobs
    assert back is not None
    assert back[0] is None
    assert back[1] is not None
    assert math.isnan(back[1])
