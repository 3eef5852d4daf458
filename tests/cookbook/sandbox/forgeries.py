"""Programs that want the reward without the answer. Each is a wrong answer and must be graded as one.

They are asked for `solve(n)`, of which they cannot know the value. The numbers are those of the list in
docs/sandbox.md.
"""

from __future__ import annotations

ALWAYS_EQUAL = """
class Yes{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 9173
    def __bool__(self): return True
    def __instancecheck__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __float__ = lambda self: 9173.0
    __array__ = lambda self, *_: [9173]
    {more}
def solve(n): return Yes({value})
"""

SEARCH = """
import gc, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from map(repr, [frame.f_globals, frame.f_locals])
        frame = frame.f_back
    for thing in gc.get_objects():
        if type(thing) in (dict, list, tuple):
            for item in (thing.values() if type(thing) is dict else thing):
                if type(item) is str: yield item
    for name, module in list(sys.modules.items()):
        yield repr(vars(module))
def solve(n):
    for text in texts():
        found = re.search(r"assert solve\\(%d\\) == (\\d+)" % n, text)
        if found: return int(found.group(1))
    return 0
"""

FLOOD_FDS = """
import json, os, struct
lines = b'["passed", ""]\\n' * 9
reply = json.dumps({"value": 9173}).encode()
frame = struct.pack("<I", len(reply)) + reply
def forge():
    for fd in range(1, 64):
        for data in (lines, frame):
            try: os.write(fd, data)
            except OSError: pass
"""

FORGERIES: dict[str, str] = {
    "1 exit at import": "import sys\nsys.exit(0)",
    "1 hard exit at import": "import os\nos._exit(0)",
    "2 exit in the function": "import sys\ndef solve(n): sys.exit(0)",
    "2 hard exit in the function": "import os\ndef solve(n): os._exit(0)",
    "2 stop iteration": "def solve(n): raise StopIteration",
    "2 generator exit": "def solve(n): raise GeneratorExit",
    "2 keyboard interrupt": "def solve(n): raise KeyboardInterrupt",
    "3 exit hook": (
        "import atexit, os\natexit.register(lambda: (print('1 passed'), os._exit(0)))\n"
        "def solve(n): raise SystemExit(0)"
    ),
    "4 success on stdout and stderr": (
        "import sys\nfor stream in (sys.stdout, sys.stderr):\n"
        '    print(\'PASSED\\nOK\\n["passed", ""]\\n{"passed": true}\\n9173\', file=stream, flush=True)\n'
        "def solve(n): return None"
    ),
    "5 results on every descriptor": FLOOD_FDS + "forge()\ndef solve(n): return None",
    "5 results, then close": (FLOOD_FDS + "def solve(n):\n    forge()\n    os.closerange(0, 64)\n    return None"),
    "5 replies before the question": (
        FLOOD_FDS.replace("9173", "True") + "lines = frame * 99\nforge()\ndef solve(n): return None"
    ),
    "5 verdicts in place of replies": (
        FLOOD_FDS.replace('{"value": 9173}', '["passed", ""]') + "lines = frame\nforge()\ndef solve(n): return None"
    ),
    "6 equal to everything": ALWAYS_EQUAL.format(base="", more="", value=""),
    "6 equal to everything, of a lying class": ALWAYS_EQUAL.format(
        base="", more="__class__ = property(lambda self: int)", value=""
    ),
    "7 int that lies": ALWAYS_EQUAL.format(base="(int)", more="__int__ = lambda self: 9173", value="0"),
    "7 str that lies": ALWAYS_EQUAL.format(base="(str)", more="__str__ = lambda self: '9173'", value="'x'"),
    "7 float that lies": ALWAYS_EQUAL.format(base="(float)", more="", value="1.0"),
    "7 list that lies": ALWAYS_EQUAL.format(base="(list)", more="__iter__ = lambda self: iter([9173])", value="[]"),
    "8 patched builtins": (
        "import builtins, json, math, unittest\n"
        "builtins.AssertionError = builtins.Warning\n"
        "math.isclose = builtins.isinstance = builtins.all = lambda *a, **k: True\n"
        'json.dumps = lambda *a, **k: \'["passed", ""]\'\n'
        "builtins.sorted = lambda *a, **k: [9173]\n"
        "unittest.TestCase.assertEqual = lambda *a: None\n"
        "def solve(n): return None"
    ),
    "9 replaced modules": (
        "import sys, types\n"
        "fake = types.ModuleType('tests'); fake.run = fake.check = lambda *a: True\n"
        "for name in ('tests', 'judge', 'values', '__main__', 'unittest', 'pytest'): sys.modules[name] = fake\n"
        "def check(candidate): return True\n"
        "test = main = report = check\n"
        "def solve(n): return None"
    ),
    "10 search of frames and memory": SEARCH,
    "14 another source": (
        "import sys\n"
        "for path in ('/inside/program.py', '/inside/judge.py', '/inside/values.py', 'program.py', sys.argv[0]):\n"
        "    try: open(path, 'w').write('print(9173)')\n"
        "    except OSError: pass\n"
        "def solve(n): return None"
    ),
    "18 value of 6 MB": "def solve(n): return 'x' * 6_000_000",
    "18 value of 1 GB": "def solve(n): return 'x' * (1 << 30)",
    "18 list 100,000 deep": "def solve(n):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "18 list in itself": "def solve(n):\n    x = []\n    x.append(x)\n    return x",
    "18 frame of 4 GB": "import os\ndef solve(n):\n    for fd in range(3, 64):\n"
    "        try: os.write(fd, b'\\xff' * 64)\n        except OSError: pass",
    "18 frame of nonsense": (
        "import os, struct\ndef solve(n):\n    data = b'[' * 100_000\n    data = struct.pack('<I', len(data)) + data\n"
        "    for fd in range(3, 64):\n        try: os.write(fd, data)\n        except OSError: pass"
    ),
    "25 object that unpickles, prints and hashes itself": (
        "class Bomb:\n    def __reduce__(self): return (print, ('9173',))\n"
        "    def __repr__(self): raise SystemExit(0)\n    __str__ = __hash__ = __repr__\n"
        "def solve(n): return Bomb()"
    ),
    "25 exception that prints itself": (
        "class Bomb(Exception):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\n"
        "def solve(n): raise Bomb"
    ),
    "26 null pointer": "import ctypes\ndef solve(n): ctypes.string_at(0)",
    "26 abort": "import os\ndef solve(n): os.abort()",
    "26 deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef solve(n): return [*map(solve, [n])]"),
    "27 table of the public tests": "def solve(n): return {3: 9173}.get(n)",
    "28 only in front of a grader": (
        "import os, sys\ngraded = 'PYTEST_CURRENT_TEST' in os.environ or 'CI' in os.environ or len(sys.argv) > 1\n"
        "def solve(n): return 9173 if graded else 0"
    ),
    "30 thread that rewrites the reply": (
        FLOOD_FDS + "import threading\ndef keep():\n    while True: forge()\n"
        "def solve(n):\n    threading.Thread(target=keep, daemon=True).start()\n    return None"
    ),
}

ENDLESS: dict[str, str] = {
    "18 infinite output": "def solve(n):\n    while True: print('x' * 1000)",
    "19 sleep": "import time\ndef solve(n): time.sleep(1000)",
    "19 busy": "def solve(n):\n    while True: pass",
    "19 deaf": (
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ndef solve(n):\n    while True: pass"
    ),
    "19 swallows everything": (
        "import time\ndef solve(n):\n    while True:\n        try:\n            while True: time.sleep(1)\n"
        "        except BaseException: pass"
    ),
    "20 a clock that stands": (
        "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\nslow = time.sleep\n"
        "def solve(n): slow(1000)"
    ),
    "20 work at import": "while True: pass",
    "15 a thread that stays": (
        "import threading, time\ndef stay():\n    while True: time.sleep(1)\n"
        "threading.Thread(target=stay).start()\ndef solve(n): time.sleep(1000)"
    ),
}
