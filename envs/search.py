"""Answer a question from a local corpus, with a full-text search (SQLite FTS5) and a reader.

    user       Which river flows through the town that Ada Brill founded? Answer with the name alone.
    assistant  search("Ada Brill founded")
    tool       Tolm: … was founded in 1702 by Ada Brill …
    assistant  read("Tolm")
    tool       Tolm lies on the river Wend. …
    assistant  Wend                                                                 1.0

A row is `{"question", "answer"}`; several right answers are separated by `|`. The corpus is a JSONL file with
`{"title", "text"}` a line; the one in the package is about towns that do not exist.
"""

from __future__ import annotations

import functools
import json
import re
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError, DataError
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step

SAMPLES = Path(__file__).with_name("samples")
CORPUS = str(SAMPLES / "search_corpus.jsonl")


class Search(Env):
    """`top` documents are shown a search; an answer counts where case, articles and punctuation aside it is equal."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, corpus: str = CORPUS, top: int = 3) -> None:
        if top < 1:
            raise ContractError(f"top = {top} must be at least 1")
        super().__init__(row)
        self.top = top
        self.corpus = load_corpus(corpus)
        self.tools = (self.search, self.read)
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """The questions in the package about its corpus: a quarter of them for evaluation, whatever the seed."""
        if split not in ("train", "eval"):
            raise ContractError(f"{cls.__name__} has no split {split!r}, only 'train' and 'eval'")
        for line in (SAMPLES / "search.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if (zlib.crc32(row["question"].encode()) % 4 == 0) == (split == "eval"):
                yield row

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question; nothing is random."""
        self.over = False
        return [{"role": "user", "content": f"{self.row['question']} Answer with the name alone."}], {}

    async def step(self, action: Message) -> Step:
        """Run the calls, or judge the answer."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        self.over = True
        right = {_plain(answer) for answer in str(self.row["answer"]).split("|")}
        return Step([], float(_plain(action.get("content") or "") in right), True, False, {})

    def oracle(self, messages: list[Message]) -> str:
        """The answer."""
        return str(self.row["answer"]).split("|")[0]

    @tool
    async def search(self, words: str) -> str:
        """Find documents; the best ones first, with the passage that fits.

        Args:
            words: what to look for
        """
        found = self.corpus.find(words, self.top)
        return "\n".join(f"{title}: {passage}" for title, passage in found) or "nothing found"

    @tool
    async def read(self, title: str) -> str:
        """Read a document.

        Args:
            title: as a search shows it
        """
        return self.corpus.text(title) or f"there is no document {title!r}"


class Corpus:
    """Documents in memory, ranked by BM25."""

    def __init__(self, documents: list[tuple[str, str]]) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
        self._database.executemany("INSERT INTO documents VALUES (?, ?)", documents)

    def find(self, words: str, top: int) -> list[tuple[str, str]]:
        """Title and passage of the best documents that have any of the words."""
        # Words alone, in quotes: what is typed must not be read as FTS5's own syntax.
        terms = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", words)[:32])
        if not terms:
            return []
        query = (
            "SELECT title, snippet(documents, 1, '', '', '…', 16) FROM documents WHERE documents MATCH ? "
            "ORDER BY rank, title LIMIT ?"
        )
        return list(self._database.execute(query, (terms, top)))

    def text(self, title: str) -> str | None:
        """The document of that title."""
        row = self._database.execute("SELECT text FROM documents WHERE title = ?", (title.strip(),)).fetchone()
        return None if row is None else str(row[0])


@functools.lru_cache(maxsize=4)
def load_corpus(path: str) -> Corpus:
    """The corpus of a JSONL file, read once a process; DataError says what is wrong with it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return Corpus([(str(d["title"]), str(d["text"])) for d in map(json.loads, filter(str.strip, lines))])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"corpus {path}: {type(error).__name__}: {error}; a line is {{'title', 'text'}}") from error


def _plain(text: str) -> str:
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))
