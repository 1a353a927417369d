"""Which part of a model's answer is the program.

1. Reasoning does not count: everything up to the last `</think>`; a `<think>` that is never closed leaves no answer.
2. Fenced blocks (``` or ~~~, any indentation; the last may be left open). The last one tagged as Python; where none is
   tagged, the last untagged one that is a program. Other tags (text, bash, output, …) are never run.
3. With an entry point, a block that defines it goes before later blocks that do not (a usage example, say).
4. Without any fence: the whole answer, where it compiles and does something.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from typing import NamedTuple

PYTHON = "python"
_TAG = re.compile(r"[\w+#.-]*")
_PYTHON_TAG = re.compile(r"(?:c?python|py|pypy)[\d.]*|[\w-]+\.py")
_LEFT_OVER = re.compile(r"(?:</?\w+>|<[|｜][^<>]*[|｜]>|\s)+")
"""What may follow the closing fence on its line: the tag around an answer, the token that ends a turn."""
_FENCE = re.compile(r"^([ \t]*(?:>[ \t]?)*)(`{3,}|~{3,})[ \t]*(.*?)[ \t]*$")
_THINK_END = re.compile(r"(?P<quoted>(['\"])</think(?:ing)?>\2)|</think(?:ing)?>", re.IGNORECASE)
_THINK_START = re.compile(r"(?P<quoted>(['\"])<think(?:ing)?>\2)|<think(?:ing)?>", re.IGNORECASE)


MOST_BLOCKS = 300
"""Fenced blocks that are read: an answer must not keep the grader busy."""


class Block(NamedTuple):
    """A fenced block: its first word in lower case ("python" for all that mean it), and what it holds."""

    tag: str
    text: str


def extract_code(answer: str, entry_point: str | None = None) -> str | None:
    """The program in a model's answer; None where there is none."""
    answer = final_part(answer.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff"))
    found = blocks(answer)
    if not found and not any(_FENCE.match(line) for line in answer.split("\n")):
        return answer.strip("\n") + "\n" if is_program(answer) else None
    chosen = [b.text for b in found if b.tag == PYTHON and b.text.strip()]
    chosen = chosen or [b.text for b in found if not b.tag and is_program(b.text)]
    if not chosen:
        return None
    if entry_point is not None:
        # A method may have been written as a function, and a function as a method.
        names = [*entry_point.split("."), "Solution"]
        found_in = [text for name in names for text in reversed(chosen) if defines(text, name)]
        return found_in[0] if found_in else chosen[-1]
    return chosen[-1]


def final_part(answer: str) -> str:
    """The answer without its reasoning."""
    ends = [end for end in _THINK_END.finditer(answer) if not end["quoted"]]
    rest = answer[ends[-1].end() :] if ends else answer
    opened = next((start for start in _THINK_START.finditer(rest) if not start["quoted"]), None)
    return rest[: opened.start()] if opened and not _in_fence(rest, opened.start()) else rest


def blocks(text: str) -> list[Block]:
    """All fenced blocks, in order; the first of very many."""
    lines = text.split("\n")
    fences = [_FENCE.match(line) for line in lines]
    found: list[Block] = []
    at = 0
    while at < len(lines) and len(found) < MOST_BLOCKS:
        opening = fences[at]
        if opening is None or (opening[2][0] == "`" and "`" in opening[3]):
            at += 1
            continue
        block, at = _read_block(lines, fences, at + 1, opening)
        found.append(block)
    return found


def _read_block(
    lines: list[str], fences: list[re.Match[str] | None], start: int, opening: re.Match[str]
) -> tuple[Block, int]:
    tag = _tag(opening[3])
    ends = list(itertools.islice((at for at in range(start, len(lines)) if _closes(fences[at], opening)), 8))
    # A docstring may hold fences of its own: the first end at which a Python block compiles is its end.
    if tag == PYTHON and len(ends) > 1:
        for end in ends:
            if end > ends[0] and any(_opens_python(fence) for fence in fences[ends[0] + 1 : end]):
                break
            if compiles(_dedent(lines[start:end], opening[1])):
                return Block(tag, _dedent(lines[start:end], opening[1])), end + 1
    end = ends[0] if ends else len(lines)
    if tag == PYTHON and (short := _ends_within(lines[start:end], opening)) is not None:
        return Block(tag, short), start + short.count("\n")
    return Block(tag, _dedent(lines[start:end], opening[1])), end + 1


def _tag(info: str) -> str:
    """`python3`, `{.python}`, `python:main.py`, `main.py`: Python."""
    found = _TAG.match(info.strip("{}. ").lower())
    tag = found[0].rstrip(".,") if found else ""
    return PYTHON if _PYTHON_TAG.fullmatch(tag) else tag


def _ends_within(lines: list[str], opening: re.Match[str]) -> str | None:
    """The block where its closing fence stands at the end of a line of the program; None where it does not."""
    at = next((n for n, line in enumerate(lines) if line.rstrip().endswith(opening[2])), None)
    # In a comment it is none: there the program goes on with it.
    if at is None or compiles(_dedent(lines[: at + 1], opening[1])):
        return None
    text = _dedent([*lines[:at], lines[at].rstrip().removesuffix(opening[2])], opening[1])
    return text if compiles(text) else None


def _closes(closing: re.Match[str] | None, opening: re.Match[str]) -> bool:
    if closing is None or not closing[2].startswith(opening[2]):
        return False
    return not closing[3] or _LEFT_OVER.fullmatch(closing[3]) is not None


def _opens_python(fence: re.Match[str] | None) -> bool:
    return fence is not None and _tag(fence[3]) == PYTHON


def _dedent(lines: list[str], prefix: str) -> str:
    text = "\n".join(line.removeprefix(prefix) if prefix else line for line in lines)
    return text.rstrip("\n") + "\n"


def _in_fence(text: str, place: int) -> bool:
    return sum(1 for line in text[:place].split("\n") if _FENCE.match(line)) % 2 == 1


def parsed(text: str) -> ast.Module | None:
    """The syntax tree; None where it is not Python (also for null bytes, and nesting too deep for the compiler)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def compiles(text: str) -> bool:
    """Whether it is Python."""
    return parsed(text) is not None


def is_program(text: str) -> bool:
    """Whether it is Python that does something: `Sorry` and `42` compile too."""
    tree = parsed(text)
    return tree is not None and any(
        not isinstance(statement, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for statement in tree.body
    )


def defines(text: str, name: str) -> bool:
    """Whether a function, class or variable of this name is made at the top level."""
    tree = parsed(text)
    return tree is not None and any(name in _names(statement) for statement in tree.body)


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    if isinstance(statement, ast.If | ast.Try):
        return {name for inner in statement.body for name in _names(inner)}
    return set()
