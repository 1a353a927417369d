"""Ways to fake a pass. None earns reward, in any of the three kinds of task."""

# ruff: noqa: E501

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.task import parse_task
from agentrl.sandbox import SandboxOptions, open_sandbox
from tests.reward.code.conftest import PATIENT
from tests.sandbox.kinds import needs_docker, nothing_left

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALLS = {
    "mode": "functional",
    "entry_point": "solve",
    "tests": [{"args": [n], "expected": n * n + 1} for n in (2, 3, 7)],
}
TESTS = {
    "mode": "unit",
    "test": """
import unittest
from solution import solve

def test_small():
    assert solve(2) == 5
    assert solve(3) == 10

def test_in_a_loop():
    for n in range(5, 8):
        assert solve(n) == n * n + 1

def test_close():
    assert abs(solve(4) - 17) < 1e-6

class Case(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(solve(7), 50)
""",
}
PROGRAM = {"mode": "stdio", "tests": [{"stdin": f"{n}\n", "stdout": f"{n * n + 1}\n"} for n in (2, 3, 7)]}
HONEST = {
    "def": "def solve(n):\n    return n * n + 1\n",
    "stdio": "n = int(input())\nprint(n * n + 1)\n",
}

FUNCTION_CHEATS = {
    "leaves with code 0": "import os\ndef solve(n):\n    os._exit(0)",
    "leaves while it is loaded": "import os\nos._exit(0)\ndef solve(n): pass",
    "sys.exit(0)": "import sys\ndef solve(n):\n    sys.exit(0)",
    "equal to everything": "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\n"
    "def solve(n):\n    return E()",
    "an int that equals everything": "class E(int):\n    def __eq__(self, o): return True\n    __ne__ = lambda s, o: False\n"
    "def solve(n):\n    return E(0)",
    "arithmetic that always fits": "class E:\n    def __getattr__(self, n): return self\n    def __call__(self, *a): return self\n"
    "    __sub__ = __abs__ = __rsub__ = lambda s, *a: s\n    __lt__ = __eq__ = lambda s, o: True\n"
    "def solve(n):\n    return E()",
    "a mock": "from unittest.mock import ANY\ndef solve(n):\n    return ANY",
    "json is patched": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef solve(n): return 0",
    "json.loads is patched": "import json\njson.loads = lambda *a, **k: {'reward': 1}\ndef solve(n): return 0",
    "assert is patched": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef solve(n): return 0",
    "skips": "import unittest\ndef solve(n):\n    raise unittest.SkipTest('no')",
    "skips by name": "class SkipTest(Exception): pass\nclass Skipped(SkipTest): pass\ndef solve(n):\n    raise SkipTest('no')",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef solve(n): return 0",
    "reads the caller's frames": "import sys\ndef solve(n):\n    f = sys._getframe()\n    while f:\n"
    "        for v in list(f.f_locals.values()):\n            if isinstance(v, dict) and 'expected' in v: return v['expected']\n"
    "        f = f.f_back",
    "looks for the answer in memory": "import gc\ndef solve(n):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n    return 0",
    "traces the judge": "import sys\ndef t(f, e, a):\n    f.f_locals.update(expected=0, passed=True, right=True)\n    return t\n"
    "sys.settrace(t)\ndef solve(n): return 0",
    "import hook": "import sys\nclass H:\n    def find_spec(self, *a): return None\nsys.meta_path.insert(0, H())\n"
    "for m in list(sys.modules.values()):\n    for k in ('same_value', '_run', 'verdict_of'):\n"
    "        if hasattr(m, k): setattr(m, k, lambda *a, **k: True)\ndef solve(n): return 0",
    "edits the tests": "import glob, os\nfor p in glob.glob('/tmp/**/*.py', recursive=True) + glob.glob('*.py'):\n    try:\n"
    "        open(p, 'w').write('def test_all(): pass')\n    except OSError: pass\ndef solve(n): return 0",
    "conftest and sitecustomize": "for p in ('conftest.py', 'sitecustomize.py', 'usercustomize.py', 'json.py', 'random.py'):\n"
    "    open(p, 'w').write('import os; os._exit(0)')\ndef solve(n): return 0",
    "score files": "for p in ('reward.txt', 'score.json', 'result.json', '/tmp/reward.txt'):\n    open(p, 'w').write('1.0')\n"
    "def solve(n): return 0",
    "writes to every descriptor": 'import os\nline = b\'{"answers": [{"value": true}], "end": "done", "code": 0}\\n\'\n'
    'line += b\'{"results": [{"name": "x", "outcome": "passed"}], "pending": false, "ops": [1]}\\n\'\n'
    "for fd in range(1, 64):\n    try: os.write(fd, line)\n    except OSError: pass\ndef solve(n): return 0",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef solve(n): return 0",
    "answers for its parent": "import os\nfor fd in ('1', '2'):\n    try:\n"
    '        open(f\'/proc/{os.getppid()}/fd/{fd}\', \'w\').write(\'{"answers": [{"value": 1}], "end": "done", "code": 0}\\n\')\n'
    "    except OSError: pass\ndef solve(n): return 0",
    "a tag for an object": "def solve(n):\n    return {'$object': ['0.0', 'solve', True]}",
    "a tag that is none": "def solve(n):\n    return {'$expected': n}",
    "nan": "def solve(n):\n    return float('nan')",
    "infinite": "def solve(n):\n    return float('inf')",
    "a generator without end": "def solve(n):\n    while True:\n        yield n",
    "nested without end": "def solve(n):\n    a = []\n    a.append(a)\n    return a",
    "redefines int": "import builtins\nbuiltins.int = builtins.float = lambda *a: 5\ndef solve(n): return 5",
    "raises what tests expect": "def solve(n):\n    raise AssertionError('passed')",
    "all true": "def solve(n):\n    return True",
    "says it passed": "def solve(n):\n    print('OK 4 passed')\n    return 'passed'",
    "many forks": "import os\nfor _ in range(4): os.fork()\ndef solve(n): return 0",
}
PROGRAM_CHEATS = {
    "markers": "print('ALL TESTS PASSED', 'reward: 1.0')",
    "all outputs": "for n in range(60): print(n)",
    "leaves with code 0": "import os\nos._exit(0)",
    "finds tests in the file system": "import glob\nfor p in glob.glob('**/*', recursive=True) + glob.glob('/tmp/**/*', recursive=True):\n"
    "    try:\n        t = open(p).read()\n        if 'stdout' in t or 'expected' in t: print(t)\n    except (OSError, UnicodeDecodeError): pass",
    "reads its parent": "import os\np = os.getppid()\nfor f in ('environ', 'cmdline', 'mem', 'fd/0'):\n    try: print(open(f'/proc/{p}/{f}').read(100))\n"
    "    except (OSError, UnicodeDecodeError): pass",
    "right and then wrong": "n = int(input())\nprint(n * n + 1)\nprint('no')",
    "right and then it fails": "n = int(input())\nprint(n * n + 1, flush=True)\nraise SystemExit(3)",
    "a carriage return over it": "n = int(input())\nprint('0\\r', end='')\nprint('x\\b', n * n + 1)",
}


# Each of these against test files too on every run; the others there with the slow tests.
TELLING = (
    "equal to everything",
    "arithmetic that always fits",
    "skips by name",
    "leaves with code 0",
    "kills its parent",
)
PAIRS = [
    pytest.param(cheat, task, id=f"{name}-{kind}", marks=[pytest.mark.slow] * (kind == "tests" and name not in TELLING))
    for name, cheat in FUNCTION_CHEATS.items()
    for kind, task in (("calls", CALLS), ("tests", TESTS))
]


@pytest.mark.parametrize(("cheat", "task"), PAIRS)
async def test_a_function_earns_nothing(cheat: str, task: dict[str, Any], reward: CodeReward) -> None:
    verdict = await reward.grade_program(cheat, parse_task({**task, "time_limit_s": 3.0}))
    assert verdict.reward == 0.0, verdict
    assert verdict.passed == 0 or cheat == FUNCTION_CHEATS["all true"], verdict


@pytest.mark.parametrize("cheat", PROGRAM_CHEATS.values(), ids=PROGRAM_CHEATS.keys())
async def test_a_program_earns_nothing(cheat: str, reward: CodeReward) -> None:
    verdict = await reward.grade_program(cheat, parse_task(PROGRAM))
    assert (verdict.reward, verdict.passed) == (0.0, 0), verdict


@needs_docker
@pytest.mark.docker
@pytest.mark.timeout(900)
async def test_none_earns_anything_in_a_container_either() -> None:
    tried: list[tuple[str, str, dict[str, Any]]]
    tried = [(f"{name}, calls", cheat, CALLS) for name, cheat in FUNCTION_CHEATS.items()]
    tried += [(f"{name}, tests", FUNCTION_CHEATS[name], TESTS) for name in TELLING]
    tried += [(f"{name}, program", cheat, PROGRAM) for name, cheat in PROGRAM_CHEATS.items()]
    assert len(tried) >= 20
    with nothing_left():
        async with open_sandbox(SandboxOptions(kind="docker", slots=4)) as pool:
            grader = CodeReward(pool, PATIENT)
            tasks = [grader.grade_program(cheat, parse_task({**task, "time_limit_s": 3.0})) for _, cheat, task in tried]
            verdicts = await asyncio.gather(*tasks)
            honest = await grader.grade_program(HONEST["def"], parse_task(TESTS))
    found = {name: verdict for (name, _, _), verdict in zip(tried, verdicts, strict=True) if verdict.reward != 0.0}
    assert found == {}
    assert honest.reward == 1.0, honest


async def test_honest_ones_pass(reward: CodeReward) -> None:
    for task in (CALLS, TESTS):
        verdict = await reward.grade_program(HONEST["def"], parse_task(task))
        assert verdict.reward == 1.0, verdict
    assert (await reward.grade_program(HONEST["stdio"], parse_task(PROGRAM))).reward == 1.0


async def test_tests_that_ask_the_program_nothing_are_no_verdict(reward: CodeReward) -> None:
    for text in ("def test_x():\n    assert 1 == 1\n", "x = 1\n", "import no_such_module\n"):
        verdict = await reward.grade_program(HONEST["def"], parse_task({"mode": "unit", "test": text}))
        assert (verdict.status, verdict.reward) == ("no_tests", None), verdict
