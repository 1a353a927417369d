"""Siblings of cases/code_grading.jsonl: other forms of the same kinds of failure. One grading each, all at once."""

# ruff: noqa: E501

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest

from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.task import parse_task

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(300)]
SUM = "a,b=map(int,input().split())\nprint(a+b)"
TWO = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]


class Sibling(NamedTuple):
    """An answer to a row, and what it must get."""

    answer: str
    row: dict[str, Any]
    status: str


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


ANSWERS = {
    "a shell example after it": fenced(SUM) + "\nRun:\n```bash\npython sol.py <<< '2 3'\n```",
    "its output after it, untagged": fenced(SUM) + "\nOutput:\n```\n5\n```",
    "the fence is never closed": "Here:\n```python\n" + SUM,
    "tildes": "~~~python\n" + SUM + "\n~~~",
    "four backticks": "````python\n" + SUM + "\n````",
    "in a list": "1. Do\n   ```python\n   a,b=map(int,input().split())\n   print(a+b)\n   ```",
    "a span in backticks before it": "```python a,b=1,2```\n" + fenced(SUM),
    "attributes after the tag": '```python title="x.py" linenums=1\n' + SUM + "\n```",
    "no tag": "```\n" + SUM + "\n```",
    "carriage returns": fenced(SUM).replace("\n", "\r\n"),
    "reasoning without its start": "blah " + fenced("print(1)") + "</think>\n" + fenced(SUM),
    "JSON after it": fenced(SUM) + '\n```json\n{"a": 1}\n```',
    "C++ before it": "```cpp\nint main(){}\n```\n" + fenced(SUM),
    "an empty block after it": fenced(SUM) + "\n```python\n```",
    "a tag after the fence": "<answer>\n" + fenced(SUM) + "</answer>",
    "the end of the turn after the fence": fenced(SUM) + "<|im_end|>",
    "the fence at the end of its last line": "```python\n" + SUM + "```\nThis adds.",
    "the file's name after the tag": "```python:main.py\n" + SUM + "\n```",
    "a version in the tag": "```python3.11\n" + SUM + "\n```",
    "the end of reasoning in a string": fenced("s = '</think>'\n" + SUM),
}
READERS = {
    "lines of sys.stdin": "import sys\nfor l in sys.stdin:\n    print(sum(map(int,l.split())))",
    "until EOFError": "while True:\n    try: a,b=map(int,input().split())\n    except EOFError: break\n    print(a+b)",
    "os.read": "import os\nprint(sum(map(int,os.read(0,1000).split())))",
    "/dev/stdin": "print(sum(map(int,open('/dev/stdin').read().split())))",
    "fileinput": "import fileinput\nfor l in fileinput.input(): print(sum(map(int,l.split())))",
    "bytes out": "import sys\na,b=map(int,input().split())\nsys.stdout.buffer.write(b'%d\\n'%(a+b))",
    "/dev/stdout": "a,b=map(int,input().split())\nopen('/dev/stdout','w').write(str(a+b)+'\\n')",
    "no line end": "a,b=map(int,input().split())\nprint(a+b,end='')",
    "sys.exit(0) at the end": SUM + "\nimport sys\nsys.exit(0)",
    "exit()": SUM + "\nexit()",
}
ENDS = {
    "sys.exit(1) at the end": (SUM + "\nimport sys\nsys.exit(1)", "2 3", "5", "runtime_error"),
    "not Python": ("def f(:\n  pass", "", "5", "runtime_error"),
    "too much memory": ("x=[0]*(10**10)", "", "1", "memory"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef g(n): return 0 if n==0 else 1+g(n-1)\nprint(g(50000))",
        "",
        "50000",
        "passed",
    ),
    "a thread with a large stack": (
        "import sys,threading\nthreading.stack_size(256<<20)\nsys.setrecursionlimit(10**6)\ndef g(n): return 0 if n==0 else 1+g(n-1)\nt=threading.Thread(target=lambda: print(g(100000)))\nt.start();t.join()",
        "",
        "100000",
        "passed",
    ),
    "a daemon that holds stdout": (
        "import os,time\nprint(5,flush=True)\nif os.fork()==0:\n    os.setsid(); time.sleep(60)",
        "",
        "5",
        "passed",
    ),
    "deaf to SIGTERM": (
        "import signal,time\nsignal.signal(signal.SIGTERM,signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "",
        "5",
        "timeout",
    ),
    "the network": (
        "import urllib.request\nprint(urllib.request.urlopen('http://example.com').status)",
        "",
        "200",
        "runtime_error",
    ),
    "a process": (
        "import subprocess\nprint(subprocess.check_output(['echo','5']).decode().strip())",
        "",
        "5",
        "passed",
    ),
    "a pool of processes": (
        "from multiprocessing import Pool\ndef f(x): return x*x\nif __name__=='__main__':\n    with Pool(2) as p: print(sum(p.map(f,[1,2])))",
        "",
        "5",
        "passed",
    ),
    "pickles a class of its own": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
        "",
        "A",
        "passed",
    ),
    "asyncio": ("import asyncio\nasync def m(): print(5)\nasyncio.run(m())", "", "5", "passed"),
    "an exponent": ("print(1e-7)", "", "0.0000001", "passed"),
    "near zero": ("print(1e-12)", "", "0.0", "passed"),
    "infinite": ("print('inf')", "", "3.5", "wrong_answer"),
    "a float for an int": ("print(5.0)", "", "5", "wrong_answer"),
    "an int for a float": ("print(2)", "", "2.0", "passed"),
    "large ints that differ by one": ("print(12345678901234567891)", "", "12345678901234567890", "wrong_answer"),
    "another case": ("print('YES')", "", "Yes", "wrong_answer"),
    "not ASCII": ("print(input()[::-1])", "héé😀", "😀ééh", "passed"),
    "nothing is expected": ("pass", "", "", "passed"),
    "something where nothing is": ("print(1)", "", "", "wrong_answer"),
    "beyond all floats": ("print('1e500')", "", "1e400", "wrong_answer"),
    "a thread that never ends": (
        "import threading,time\nthreading.Thread(target=time.sleep,args=(60,)).start()\nprint(5)",
        "",
        "5",
        "timeout",
    ),
    "half a character in the input": ("print(5)", "\ud83d", "5", "passed"),
    "a line too few": ("print(1)", "", "1\n2", "wrong_answer"),
    "a line too many": ("print(1);print(2)", "", "1", "wrong_answer"),
}
FUNCTIONS: dict[str, tuple[str, list[Any], Any, str]] = {
    "it prints too": ("def solve(x):\n    print('dbg'); return x", [1], 1, "passed"),
    "a set": ("def solve(x): return {1,2}", [1], [1, 2], "wrong_answer"),
    "keys of JSON": ("def solve(x): return {1:'a'}", [1], {"1": "a"}, "passed"),
    "another name": ("def other(x): return x", [1], 1, "runtime_error"),
    "a lambda": ("solve = lambda x: x+1", [1], 2, "passed"),
    "it leaves": ("import sys\ndef solve(x): sys.exit(0)", [1], None, "runtime_error"),
    "None": ("def solve(x): return None", [1], None, "passed"),
    "None for 0": ("def solve(x): pass", [1], 0, "wrong_answer"),
    "rounding": ("def solve(x): return 0.1+0.2", [1], 0.3, "passed"),
    "a generator": ("def solve(x):\n    yield from [1,2]", [1], [1, 2], "wrong_answer"),
    "no end of recursion": ("def solve(x): return solve(x)", [1], 1, "runtime_error"),
    "a long list": ("def solve(n): return list(range(n))", [20000], list(range(20000)), "passed"),
    "a main guard": (
        "def solve(x): return x\nif __name__=='__main__':\n    print(solve(int(input())))",
        [1],
        1,
        "passed",
    ),
    "half a character": ("def solve(x): return '\\ud800'", [1], "x", "wrong_answer"),
    "6000 digits": ("def solve(x): return 10**6000", [1], 1, "wrong_answer"),
    "bytes": ("def solve(x): return b'a'", [1], "a", "wrong_answer"),
    "async": ("async def solve(x): return x+1", [1], 2, "passed"),
    "a named tuple": (
        "from collections import namedtuple\nP=namedtuple('P','x y')\ndef solve(x): return P(1,2)",
        [1],
        [1, 2],
        "passed",
    ),
    "an int that is equal to everything": (
        "class E(int):\n    __eq__=lambda s,o: True\ndef solve(x): return E(4)",
        [1],
        5,
        "wrong_answer",
    ),
    "a fraction": ("from fractions import Fraction\ndef solve(x): return Fraction(1,2)", [1], 0.5, "passed"),
    "a method for a function": ("class Solution:\n    def solve(self,x): return x", [1], 1, "passed"),
}
TESTS = {
    "an expected exception": (
        "def f(x): raise ValueError('x')",
        "with pytest.raises(ValueError):\n        f(1)",
        "passed",
    ),
    "another exception": (
        "def f(x): raise KeyError('x')",
        "with pytest.raises(ValueError):\n        f(1)",
        "runtime_error",
    ),
    "approx": ("def f(x): return 0.1+0.2", "assert f(1) == pytest.approx(0.3)", "passed"),
    "a loop": ("def f(x): return x*x", "for i in range(100): assert f(i) == i*i", "passed"),
    "random inputs": (
        "def f(x): return sorted(x)",
        "random.seed(0)\n    for i in range(20):\n        xs=[random.randint(0,9) for _ in range(10)]\n        assert f(xs) == sorted(xs)",
        "passed",
    ),
    "the name is missing": ("def g(x): return x", "assert f(1) == 1", "runtime_error"),
    "no end": ("def f(x):\n    while True: pass", "assert f(1) == 1", "timeout"),
    "asynchronous": ("async def f(x): return x*x", "import asyncio\n    assert asyncio.run(f(3)) == 9", "passed"),
    "it prints": ("def f(x):\n    print('hello'); return x", "assert f(1) == 1", "passed"),
}
CALLS = json.dumps([{"input": "[1, 2]\n3\n", "output": "6\n"}])
LIVE = {"public_test_cases": CALLS, "metadata": '{"func_name": "f"}'}
STDIN = {"public_test_cases": '[{"input": "2 3", "output": "5"}]', "metadata": "{}"}
APPS: dict[str, Any] = {"input_output": {"fn_name": "f", "inputs": [[[1]]], "outputs": [[1]]}}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "LiveCodeBench: List without an import": (
        "class Solution:\n    def f(self, xs: List[int], k: int) -> int: return sum(xs)+k",
        LIVE,
    ),
    "LiveCodeBench: a function for a method": ("def f(xs,k): return sum(xs)+k", LIVE),
    "LiveCodeBench: names without an import": (
        "a,b=map(int,input().split())\nprint(floor(sqrt(pow(a+b,2,1000))))",
        STDIN,
    ),
    "LiveCodeBench: deep recursion": ("def g(n): return n and 1+g(n-1)\ninput()\nprint(g(5000)-4995)", STDIN),
    "APPS: a list that is not wrapped": ("def f(x): return x", APPS),
    "APPS: a value that is": ("def f(x): return x[0]", APPS),
    "APPS: a method for a function": ("class Solution:\n    def f(self,x): return x", APPS),
    "the future before the preamble": (
        "from __future__ import annotations\ndef f(x): return List and x",
        {
            "mode": "functional",
            "entry_point": "f",
            "tests": [{"args": [1], "expected": 1}],
            "prompt_preamble": "from typing import List\n",
        },
    ),
    "assertions without a function": (
        "def f(x): return x",
        {"mode": "unit", "test": "from solution import f\nassert f(1) == 1"},
    ),
    "a path in the arguments": (
        "def f(path): return len(path) > 0",
        {"mode": "unit", "test": "from solution import f\ndef test_it(tmp_path):\n    assert f(str(tmp_path))\n"},
    ),
    "an async test": (
        "async def f(x): return x",
        {"mode": "unit", "test": "from solution import f\nasync def test_it():\n    assert await f(1) == 1\n"},
    ),
}
CASES = {
    **{name: Sibling(fenced(p), row, "passed") for name, (p, row) in ROWS.items()},
    **{f"answer: {n}": Sibling(a, {"mode": "stdio", "tests": TWO}, "passed") for n, a in ANSWERS.items()},
    "answer: reasoning without its end": Sibling("<think>\n" + fenced(SUM), {"mode": "stdio", "tests": TWO}, "no_code"),
    "answer: C++ alone": Sibling("```cpp\nint main(){}\n```", {"mode": "stdio", "tests": TWO}, "no_code"),
    **{f"reads: {n}": Sibling(fenced(p), {"mode": "stdio", "tests": TWO}, "passed") for n, p in READERS.items()},
    **{
        f"program: {n}": Sibling(fenced(p), {"mode": "stdio", "tests": [{"stdin": i + "\n", "stdout": o + "\n"}]}, s)
        for n, (p, i, o, s) in ENDS.items()
    },
    **{
        f"function: {n}": Sibling(
            fenced(p), {"mode": "functional", "entry_point": "solve", "tests": [{"args": a, "expected": e}]}, s
        )
        for n, (p, a, e, s) in FUNCTIONS.items()
    },
    **{
        f"tests: {n}": Sibling(
            fenced(p),
            {"mode": "unit", "test": f"import pytest, random\nfrom solution import f\ndef test_it():\n    {t}\n"},
            s,
        )
        for n, (p, t, s) in TESTS.items()
    },
}


async def test_every_sibling_gets_its_status(reward: CodeReward) -> None:
    # What ends by itself has all the time it needs.
    limits = [4.0 if case.status == "timeout" else 60.0 for case in CASES.values()]
    given = zip(CASES.values(), limits, strict=True)
    rows = [parse_task({"time_limit_s": limit, **case.row}) for case, limit in given]
    graded = await asyncio.gather(*(reward.grade(c.answer, row) for c, row in zip(CASES.values(), rows, strict=True)))
    got = {name: str(verdict.status) for name, verdict in zip(CASES, graded, strict=True)}
    assert {name: status for name, status in got.items() if status != CASES[name].status} == {}
