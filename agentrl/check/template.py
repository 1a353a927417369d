"""Whether what an environment says survives a chat template: as it is said, in the place where it is said."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.check.findings import Code, Findings
from agentrl.check.transcript import Transcript
from agentrl.endpoint.messages import canonical
from agentrl.endpoint.template import ChatTemplate
from agentrl.errors import AgentRLError
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Message


@functools.cache
def shipped_template() -> ChatTemplate:
    """The tiny model's: ChatML with calls and results, one token a byte, so that nothing is lost in tokens."""
    with tempfile.TemporaryDirectory(prefix="agentrl-template-") as folder:
        return ChatTemplate.load(make_tiny_model(Path(folder), layers=1, hidden=16, heads=1, kv_heads=1))


def check_messages(record: Transcript, template: ChatTemplate, findings: Findings) -> None:
    """Every message has a known role and text that is rendered whole; the chat can be rendered at every turn."""
    if not record.first:
        findings.add(Code.TEMPLATE, "reset gave no messages: there is nothing that the model could answer")
        return
    _check_order(record, findings)
    said = [message for messages in (record.first, *record.observations) for message in messages]
    for message in said:
        if (seen := _lost(message, template)) is not None:
            findings.add(Code.TEMPLATE, seen)
            return
    try:
        template.text(record.messages, generation=record.messages[-1]["role"] != "assistant")
    except AgentRLError as error:
        findings.add(Code.TEMPLATE, f"the template refused the conversation: {error}")


def _lost(message: Message, template: ChatTemplate) -> str | None:
    """What is wrong with one message; None where its text comes out as it went in."""
    try:
        clean = canonical(message)
    except AgentRLError as error:
        return str(error)
    content = message.get("content")
    if isinstance(content, str) and clean["content"] != content:
        return f"the text {content!r:.100} cannot be encoded (a lone surrogate); decode bytes with errors='replace'"
    if not clean["content"] and message["role"] == "tool":
        return None
    ready = template.prepare(clean)
    if template.unmarked(ready["content"]) != clean["content"]:
        return f"the text {clean['content']!r:.100} is changed on its way into the template"
    tokens = template.encode_text(ready["content"])
    if template.decode(tokens) != clean["content"]:
        return (
            f"the text {clean['content']!r:.100} is another one after the tokenizer: {template.decode(tokens)!r:.100}"
        )
    return None


def _check_order(record: Transcript, findings: Findings) -> None:
    roles = [str(message.get("role")) for message in record.first]
    if roles[-1] not in ("user", "tool"):
        findings.add(Code.ORDER, f"reset ends with a message of role {roles[-1]!r}")
    if "system" in roles[1:] or _any_system(record.observations):
        findings.add(Code.ORDER, "there is a system message after the first place, which many templates refuse")
    for turn, observation in enumerate(record.observations[:-1]):
        if not observation:
            findings.add(Code.ORDER, f"step {turn + 1} goes on without any new message: the model answers itself")


def _any_system(observations: Sequence[Sequence[Message]]) -> bool:
    return any(message.get("role") == "system" for messages in observations for message in messages)
