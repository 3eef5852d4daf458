"""Unit tests against programs: what is right passes, what is wrong fails, values arrive as they are."""

from __future__ import annotations

import pytest

from cookbook.lib.sandbox import Limits, Outcome, Sandbox, UnitTests

VALUES = """
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
def echo(*args, **kwargs): return kwargs or (args[0] if len(args) == 1 else args)
class Name(str): pass
def odd(kind):
    point = namedtuple("Point", "x y")(1, 2)
    return {"counter": Counter("aab"), "ordered": OrderedDict(a=1), "default": defaultdict(int, b=2), "name": Name("n"),
            "point": point, "true": True, "array": bytearray(b"xy"), "nan": math.nan, "minus": -0.0}[kind]
"""


PLAIN = [
    "None", "True", "0", "-1", "1 << 62", "10 ** 4000", "-(1 << 63)", "0.1", "1e308", "float('inf')", "1j", "''",
    "'\\u20ac\\ud800\\x00'", "b'\\x00\\xff'", "[]", "[1, [2, (3,)]]", "()", "{1, 'a', (2, 3)}", "frozenset({1})",
    "{}", "{1: 'a', (1, 2): {3}, None: [True]}", "str", "[int, dict]",
]  # fmt: skip


def test_plain_values_keep_their_types(sandbox: Sandbox):
    code = "value = {0}\nback = echo(value)\n"
    code += "assert back == value and type(back) is type(value), '{1}'\nassert repr(echo([value])) == repr([value])"
    tests = [code.format(value, number) for number, value in enumerate(PLAIN)]
    verdict = sandbox.grade(VALUES, UnitTests(tests, ["echo"]))
    assert verdict.passed, verdict


def test_subclasses_arrive_as_what_they_are_underneath(sandbox: Sandbox):
    expected = {
        "counter": "{'a': 2, 'b': 1}", "ordered": "{'a': 1}", "default": "{'b': 2}", "name": "'n'", "point": "(1, 2)",
        "true": "True", "array": "b'xy'", "nan": "nan", "minus": "-0.0",
    }  # fmt: skip
    tests = [f"assert repr(odd({kind!r})) == {shown!r}" for kind, shown in expected.items()]
    verdict = sandbox.grade(VALUES, UnitTests([*tests, "assert echo(a=1) == {'a': 1}"], ["odd", "echo"]))
    assert verdict.passed, verdict


def test_objects_of_the_program(sandbox: Sandbox):
    code = (
        "class Node:\n    def __init__(self, value): self.value, self.left = value, None\n"
        "    def double(self): return 2 * self.value\n"
        "    def __eq__(self, other): return True\n"
        "def depth(node): return 1 + depth(node.left) if node else 0\n"
    )
    tests = [
        "root = Node(3)\nroot.left = Node(4)\nassert depth(root) == 2",
        "assert Node(3).double() == 6",
        "root = Node(3)\nroot.left = Node(4)\nassert root.left.value == 4",
    ]
    verdict = sandbox.grade(code, UnitTests(tests, ["Node", "depth"]))
    assert verdict.passed, verdict
    for lenient in ("assert Node(3) == 3", "assert Node(3)", "assert Node(3) in [3]", "assert str(Node(3))"):
        verdict = sandbox.grade(code, UnitTests([lenient], ["Node"]))
        assert (verdict.outcome, verdict.tests_passed) == (Outcome.OUTPUT, 0), lenient


def test_counts_and_the_first_reason(sandbox: Sandbox):
    tests = ["assert f(1) == 1", "assert f(2) == 3, 'two'", "assert f(-1) == 1", "assert f(4) == 4"]
    code = "def f(n):\n    if n < 0: raise ValueError('negative')\n    return n"
    verdict = sandbox.grade(code, UnitTests(tests, ["f"]))
    assert (verdict.outcome, verdict.tests_passed, verdict.tests) == (Outcome.FAILED, 2, 4)
    assert verdict.reason == "AssertionError: two"
    verdict = sandbox.grade(code, UnitTests(tests[2:], ["f"]))
    assert (verdict.outcome, verdict.tests_passed) == (Outcome.ERROR, 1)
    assert verdict.reason == "ValueError: negative"


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("def f(n", Outcome.ERROR, "SyntaxError"),
        ("x = 1", Outcome.ERROR, "the program has no f"),
        ("f = 1", Outcome.ERROR, "the program's f is no function"),
        ("f(3)", Outcome.ERROR, "NameError"),
        ("def f(n): return bytearray(10 ** 11)", Outcome.MEMORY, "MemoryError"),
        ("x = [0] * 10 ** 10", Outcome.MEMORY, "MemoryError"),
        ("def f(n): return iter([n])", Outcome.OUTPUT, "no plain data"),
        ("def f(n): return 'a' * 5_000_000", Outcome.ERROR, "a value of 5000013 bytes"),
        ("\x00\ud800", Outcome.ERROR, "Error"),
        ("", Outcome.ERROR, "the program has no f"),
    ],
)
def test_what_went_wrong_is_told_apart(code: str, outcome: Outcome, reason: str, sandbox: Sandbox):
    verdict = sandbox.grade(code, UnitTests(["assert f(3) == 3"], ["f"]))
    assert (verdict.outcome, verdict.tests_passed) == (outcome, 0)
    assert reason in verdict.reason


def test_tests_may_expect_an_exception(sandbox: Sandbox):
    expects = (
        "try:\n    f(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False"
    )
    tests = UnitTests([expects], ["f"])
    assert sandbox.grade("def f(n): raise ValueError('negative')", tests).passed
    assert not sandbox.grade("def f(n): raise KeyError('negative')", tests).passed
    assert not sandbox.grade("def f(n): return n", tests).passed


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os\ndef f(n): os._exit(0)", Outcome.CRASHED),
        ("import sys\ndef f(n): sys.exit(0)", Outcome.ERROR),
        ("def f(n): raise KeyboardInterrupt", Outcome.ERROR),
        ("import os\ndef f(n): os.closerange(3, 99)", Outcome.CRASHED),
        ("import os\ndef f(n):\n    for fd in range(3, 99):\n        try: os.write(fd, b'xxxx{}')\n"
         "        except OSError: pass", Outcome.OUTPUT),
    ],
)  # fmt: skip
def test_an_end_is_no_exception_that_a_test_expects(code: str, outcome: Outcome, sandbox: Sandbox):
    """Nor is a value that cannot be compared: a test that catches whatever comes is not satisfied by those."""
    anything = "try:\n    f(-1)\nexcept BaseException:\n    pass\nelse:\n    assert False"
    verdict = sandbox.grade(code, UnitTests([anything, anything], ["f"]))
    assert (verdict.outcome, verdict.tests_passed) == (outcome, 0)
    lenient = "try:\n    assert f(-1) == 3\nexcept Exception:\n    pass"
    assert sandbox.grade("def f(n): return object()", UnitTests([lenient], ["f"])).outcome is Outcome.OUTPUT


def test_a_value_that_cannot_be_compared_fails_one_test(sandbox: Sandbox):
    code = "def f(n): return object() if n == 1 else n"
    verdict = sandbox.grade(code, UnitTests(["assert f(1) == 1", "assert f(2) == 2"], ["f"]))
    assert (verdict.outcome, verdict.tests_passed) == (Outcome.OUTPUT, 1)


def test_tests_keep_their_own_helpers(sandbox: Sandbox):
    """A program that defines a name of the tests again changes nothing for them."""
    tests = UnitTests(
        ["assert close(f(2), 4)"], ["f"], "import math\ndef close(a, b): return math.isclose(a, b, rel_tol=1e-6)"
    )
    cheat = "import math\ndef close(a, b): return True\nmath.isclose = close\nlen = abs = close\n"
    assert not sandbox.grade(cheat + "def f(n): return 5", tests).passed
    assert sandbox.grade(cheat + "def f(n): return n * n", tests).passed


def test_a_change_to_an_argument_stays_in_the_program(sandbox: Sandbox):
    tests = UnitTests(["items = [2, 1]\nassert f(items) is None and items == [2, 1]"], ["f"])
    assert sandbox.grade("def f(items): items.sort()", tests).passed


def test_the_same_seed_gives_the_same_draws(isolating: None):
    code = "import random\norder = list({'a', 'b', 'c', 'd', 'e'})\ndef f(): raise ValueError([random.random(), order])"
    reasons = []
    for seed in (1, 1, 2):
        with Sandbox(seed=seed) as sandbox:
            reasons.append(sandbox.grade(code, UnitTests(["f()"], ["f"])).reason)
    assert reasons[0] == reasons[1] != reasons[2]


def test_threads_and_dataclasses_work(sandbox: Sandbox):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from concurrent.futures import ThreadPoolExecutor\nimport asyncio\n"
        "@dataclass\nclass P:\n    x: int\n"
        "async def later(n): await asyncio.sleep(0); return n\n"
        "def f(n):\n    with ThreadPoolExecutor(4) as pool: total = sum(pool.map(lambda i: P(i).x, range(n)))\n"
        "    return total + asyncio.run(later(1))\n"
        "if __name__ == '__main__':\n    raise SystemExit\n"
    )
    verdict = sandbox.grade(code, UnitTests(["assert f(5) == 11"], ["f"]))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("tests", "names", "setup", "message"),
    [
        ([], ["f"], "", "at least one"),
        ("assert f()", ["f"], "", "list of strings"),
        (["assert f()"], [], "", "which names"),
        (["assert f("], ["f"], "", "test 0 is not Python"),
        (["assert f()"], ["f"], "import", "setup is not Python"),
    ],
)
def test_tests_that_could_pass_anything_are_refused(tests, names, setup, message):
    with pytest.raises(ValueError, match=message):
        UnitTests(tests, names, setup)


def test_many_at_once(isolating: None):
    tests = UnitTests(["assert f(7) == 49"], ["f"])
    with Sandbox(workers=4, limits=Limits(wall_seconds=60)) as sandbox:
        futures = [sandbox.submit(f"def f(n): return n * n + {i % 2}", tests) for i in range(12)]
        assert [future.result().reward for future in futures] == [1, 0] * 6
