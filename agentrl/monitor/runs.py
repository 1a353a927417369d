"""A run's folder as the page reads it: never written, never locked, whole or half, alive, ended or crashed."""

from __future__ import annotations

import json
import threading
import tomllib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.conductor.folder import RunFolder
from agentrl.errors import ConfigError
from agentrl.monitor.episodes import Episodes
from agentrl.monitor.series import Cursor, Series


class Run:
    """One run. Its methods block on disk: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        if not (self.folder.is_run or self.folder.metrics.exists()):
            raise ConfigError(f"{path} is no run's folder: it has neither config.toml nor metrics.jsonl")
        self.name = self.folder.path.name
        self.episodes = Episodes(self.folder.path / "episodes.sqlite")
        self._series = Series(self.folder.metrics)
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._looked = False

    def series(self, cursor: Cursor, keys: list[str]) -> dict[str, Any]:
        """See `Series.since`."""
        with self._lock:
            self._series.refresh()
            return self._series.since(cursor, keys)

    def last(self) -> dict[str, float]:
        """The figures of the last step."""
        with self._lock:
            self._series.refresh()
            return self._series.last()

    def state(self) -> dict[str, Any]:
        """state.json; empty where it is missing or half there."""
        try:
            found = json.loads(self.folder.state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def overview(self) -> dict[str, Any]:
        """What the run is and how it stands."""
        state, alive, config = self.state(), self.folder.locked, self._config()
        phase = str(state.get("phase", "starting"))
        if not alive and phase not in ("finished", "failed", "stopped"):
            phase = f"died while {phase}"
        last = self.last()
        return {
            "name": self.name,
            "path": str(self.folder.path),
            "alive": alive,
            "phase": phase,
            "step": last.get("step", 0),
            "steps": _of(config.get("train"), "steps") or state.get("steps"),
            "env": _environment(config.get("env")),
            "model": config.get("model"),
            "error": state.get("error"),
            "waits": state.get("waits", []) if alive else [],
            "time": state.get("time"),
            "episodes": self.episodes.path.exists(),
        }

    def config_text(self) -> str:
        """config.toml."""
        try:
            return self.folder.config.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def pieces(self, ids: list[int]) -> list[str] | None:
        """The text of each token; None where the run has no tokenizer any more."""
        with self._lock:
            if not self._looked:
                self._tokenizer, self._looked = self._find_tokenizer(), True
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        texts: list[str] = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
        # A token that is part of a character decodes to U+FFFD: the vocabulary's own name of it says more.
        return [
            (tokenizer.id_to_token(i) or f"<{i}>") if text == "" or "�" in text else text
            for i, text in zip(ids, texts, strict=True)
        ]

    def close(self) -> None:
        """Close its files."""
        self.episodes.close()

    def _config(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.config_text())
        except tomllib.TOMLDecodeError:
            return {}

    def _find_tokenizer(self) -> Tokenizer | None:
        checkpoints = sorted(self.folder.checkpoints.glob("step-*/model"))
        configured = self._config().get("model")
        for folder in (self.folder.model, *reversed(checkpoints), *([Path(configured)] if configured else [])):
            path = folder / "tokenizer.json"
            if path.is_file():
                try:
                    return Tokenizer.from_file(str(path))
                except Exception:  # the library raises plain Exception for a file it cannot read
                    continue
        return None


def _environment(section: object) -> str | None:
    """The class, or those of a mixture."""
    if isinstance(section, list):
        return " + ".join(str(_of(part, "path")) for part in section)
    path = _of(section, "path")
    return None if path is None else str(path)


def _of(section: object, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else None
