"""Where the answer stands: the markers of a completion, and what a gold answer's column may hold around it."""

from __future__ import annotations

import re

from agentrl.reward.options import Marker

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE = re.compile(r"-?\d+(?:[.,]\d+)*(?:/\d+)?|\\(?:frac|sqrt|pi)\b[^$\s.]*|[A-Za-z](?=\s*\$)")
_THINK_END = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
_THINK_START = re.compile(r"<(?:think|thinking|reasoning)>", re.IGNORECASE)
_FINAL = re.compile(
    r"\bfinal\s+answer\b\s*(?:\*\*|__)?\s*(?:is\b)?\s*[:：]?\s*(?:\*\*|__)?\s*(?:is\b\s*:?)?", re.IGNORECASE
)
_NUMBER = re.compile(
    r"(?<![\w.])[-−]?\s?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+(?!\d|\.\d))?\s?\\?%?"
)
_PLACEHOLDERS = frozenset(
    {"", "...", "…", r"\ldots", r"\dots", "answer", "your answer", "final answer", r"\text{answer}"}
)


def answer_text(completion: str, marker: Marker) -> str | None:
    """The answer in a completion, reasoning between <think> tags left out; None where there is no marker."""
    text = without_thinking(completion)
    if marker is Marker.WHOLE:
        return text.strip() or None
    if marker is Marker.BOXED:
        return last_box(text)
    if marker is Marker.FINAL_ANSWER:
        return _final_answer(text)
    if marker is Marker.LAST_NUMBER:
        return _last_number(text)
    if marker is Marker.GSM8K:
        return _after_hashes(text)
    return last_box(text) if _BOX.search(text) and last_box(text) is not None else _final_answer(text)


def gold_text(gold: str) -> str:
    """The answer in a gold column: after GSM8K's `####`, in the last box, or the whole."""
    if "####" in gold:
        return _after_hashes(gold) or ""
    return (last_box(gold) or gold).strip()


def without_thinking(completion: str) -> str:
    """What follows the reasoning; nothing where the reasoning never ends."""
    text = _THINK_END.split(completion)[-1]
    return text[: start.start()] if (start := _THINK_START.search(text)) else text


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed`; a bare mention of the word is none, and neither is an empty box."""
    found = None
    for box in _BOX.finditer(text):
        at = box.end()
        if text[at : at + 1] == "{":
            content = braced(text, at)
            # A box that never closes was cut off: what came before it is not the answer either.
            if content is None:
                return None
        else:
            bare = _BARE.match(text, at)
            content = bare[0] if bare else None
        if content is not None and content.strip().lower() not in _PLACEHOLDERS:
            found = content.strip()
    return found


def braced(text: str, at: int) -> str | None:
    """What stands in the braces that open at `at`; None where they do not close."""
    depth, start = 0, at + 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        at += 1
        if depth == 0:
            return text[start : at - 1]
    return None


def _final_answer(text: str) -> str | None:
    marks = list(_FINAL.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].lstrip(" \t\r\n*_#:")
    line = re.split(r"[.!]\s+(?=[A-Z])", rest.splitlines()[0].strip())[0] if rest else ""
    box = last_box(line)
    return (box if box is not None else line.strip("*_` ")) or None


def _last_number(text: str) -> str | None:
    found = [match[0] for match in _NUMBER.finditer(text)]
    return found[-1].strip() if found else None


def _after_hashes(text: str) -> str | None:
    _, marker, answer = text.rpartition("####")
    lines = answer.strip().splitlines()
    return lines[0].strip() or None if marker and lines else None
