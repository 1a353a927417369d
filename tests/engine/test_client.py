"""The client against a server that misbehaves as real ones do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.types import Completion, Span
from agentrl.errors import DeadlineExceeded, EngineError, RequestRefused
from agentrl.testing.scripted_server import Fault, ScriptedServer
from agentrl.types import Version
from tests.engine.kit import clock, own_port, request, until

V10, V11 = Version(1, 0), Version(1, 1)


def _counting(prompt: Sequence[int]) -> list[int]:
    """Goes on counting from the prompt's last token, to 40: a continuation is exact if nothing is lost or doubled."""
    return list(range(prompt[-1] + 1, 41))


def _generations(server: ScriptedServer) -> list[dict[str, object]]:
    return [body for path, body in server.calls if path == "/generate"]


async def test_an_aborted_reply_is_resumed_and_never_shown_as_finished() -> None:
    async with ScriptedServer(_counting) as server:
        server.faults += [Fault("abort", after=0), Fault("abort", after=2), Fault("abort", after=3)]
        client = EngineClient(server.url)
        seen: list[Completion] = []
        done = await client.generate(request("r", [9], max_tokens=12), seen.append)
        asked = _generations(server)
        await client.close()
    assert done.tokens.tolist() == list(range(10, 22))
    assert (done.finish, done.matched, done.spans) == ("length", None, (Span(V10, 0, 12),))
    assert [b["sampling_params"]["max_new_tokens"] for b in asked] == [12, 12, 10, 7]  # type: ignore[index]
    assert asked[3]["input_ids"] == list(range(9, 15))
    assert [p.tokens.tolist() for p in seen] == [list(range(10, 10 + len(p.tokens))) for p in seen]


async def test_an_abort_after_the_last_token_of_the_budget_is_a_length_stop() -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault("abort", after=3))
        client = EngineClient(server.url)
        done = await client.generate(request("r", [9], max_tokens=3))
        await client.close()
    assert (done.tokens.tolist(), done.finish) == ([10, 11, 12], "length")


@pytest.mark.parametrize("tokens", [(12,), (10, 11, 12)])
async def test_an_abort_in_the_step_of_a_stop_token_ends_there(tokens: tuple[int, ...]) -> None:
    """The reply says "abort" and ends with a stop token: going on would sample beyond the end of the turn."""
    async with ScriptedServer(_counting) as server:
        server.faults += [Fault("late_abort", after=1)] * (len(tokens) - 1) + [
            Fault("late_abort", after=4 - len(tokens))
        ]
        client = EngineClient(server.url)
        done = await client.generate(request("r", [9], stop_token_ids=(12,)))
        await client.close()
        assert len(_generations(server)) == len(tokens)
    assert (done.tokens.tolist(), done.finish, done.matched) == ([10, 11, 12], "stop", 12)


async def test_a_connection_lost_after_the_last_token_asks_for_nothing_more() -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault("reset", after=4))
        client = EngineClient(server.url)
        done = await client.generate(request("r", [9], max_tokens=4), lambda _: None)
        await client.close()
        assert len(_generations(server)) == 1
    assert (done.tokens.tolist(), done.finish) == ([10, 11, 12, 13], "length")


async def test_deterministic_refusals_are_not_retried() -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault("status", status=400, message="requested token count exceeds context"))
        client = EngineClient(server.url)
        with pytest.raises(RequestRefused, match="exceeds context"):
            await client.generate(request("r", [9]))
        await client.close()
        assert len(_generations(server)) == 1


@pytest.mark.parametrize("kind", ["status", "status_event", "status_finish"])
@pytest.mark.parametrize(("status", "error"), [(400, RequestRefused), (422, RequestRefused), (500, EngineError)])
async def test_a_refusal_is_one_in_every_form(kind: str, status: int, error: type[Exception]) -> None:
    """As an answer, as an event of a stream and as a finish reason: asked once, and said as the server said it."""
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault(kind, after=2, status=status, message="no room in the context"))
        client = EngineClient(server.url)
        with pytest.raises(error, match="no room in the context"):
            await client.generate(request("r", [9]), lambda _: None)
        await client.close()
        assert len(_generations(server)) == 1


@pytest.mark.parametrize("kind", ["status", "status_event", "status_finish"])
async def test_a_busy_server_is_asked_again_in_every_form(kind: str) -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault(kind, after=2))
        client = EngineClient(server.url)
        done = await client.generate(request("r", [9], max_tokens=6), lambda _: None)
        await client.close()
        assert len(_generations(server)) == 2
    assert done.tokens.tolist() == list(range(10, 16))


@pytest.mark.parametrize("status", [503, 429])
async def test_a_busy_server_is_waited_for_by_time(status: int) -> None:
    async with ScriptedServer(_counting) as server:
        server.faults += [Fault("status", status=status)] * 4
        client = EngineClient(server.url)
        assert (await client.generate(request("r", [9], max_tokens=2))).tokens.tolist() == [10, 11]
        server.faults += [Fault("status", status=status)] * 1000
        progress = client.begin(request("r2", [9]))
        task, move = asyncio.create_task(client.go_on(progress)), clock()
        await until(lambda: str(status) in progress.waiting_for)
        move(1000.0)
        with pytest.raises(DeadlineExceeded, match=str(status)):
            await task
        await client.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_lost_connection_is_aborted_before_a_retry(streamed: bool) -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault("reset", after=3))
        client = EngineClient(server.url)
        done = await client.generate(request("r", [9], max_tokens=6), (lambda _: None) if streamed else None)
        await client.close()
        order = [(path, body.get("rid")) for path, body in server.calls if path in ("/generate", "/abort_request")]
        assert not server.running
    assert done.tokens.tolist() == list(range(10, 16))
    assert order == [("/generate", "r."), ("/abort_request", "r."), ("/generate", "r~1.")]
    if streamed:
        assert _generations(server)[1]["input_ids"] == [9, 10, 11, 12]


async def test_an_abort_that_is_not_answered_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.client._ABORT_SECONDS", 0.1)
    async with ScriptedServer(_counting, control_delay=60.0) as server:
        server.faults.append(Fault("reset", after=3))
        client = EngineClient(server.url)
        task = asyncio.create_task(client.generate(request("r", [9], max_tokens=6)))
        await until(lambda: len(server.calls) >= 3 or task.done())
        assert [path for path, _ in server.calls] == ["/generate", "/abort_request", "/abort_request"]
        server.control_delay = 0.0
        assert (await task).tokens.tolist() == list(range(10, 16))
        await client.close()


async def test_a_refused_connection_is_tried_again_without_an_abort() -> None:
    with own_port() as port:
        client = EngineClient(f"http://127.0.0.1:{port}")
        progress = client.begin(request("r", [9], max_tokens=2))
        task = asyncio.create_task(client.go_on(progress))
        await until(lambda: progress.losses >= 2)
        server = ScriptedServer(_counting)
        await server.start(port)
        assert (await task).tokens.tolist() == [10, 11]
        assert [path for path, _ in server.calls] == ["/generate"]
        await client.close()
        await server.stop()


async def test_the_deadline_names_what_was_waited_for_and_aborts() -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault("hang", after=2))
        client = EngineClient(server.url)
        seen: list[Completion] = []
        task, move = asyncio.create_task(client.generate(request("r", [9]), seen.append)), clock()
        await until(lambda: len(seen) == 2)
        move(1000.0)
        with pytest.raises(DeadlineExceeded, match=r"2 of 8 tokens while waiting for generated tokens"):
            await task
        await client.close()
        assert ("/abort_request", {"rid": "r."}) in server.calls


async def test_cancelling_sends_an_abort_and_again_after_a_pause() -> None:
    async with ScriptedServer(_counting) as server:
        client = EngineClient(server.url)
        await client.pause()
        task = asyncio.create_task(client.generate(request("r", [9])))
        await until(lambda: _generations(server))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: any(path == "/abort_request done" for path, _ in server.calls))
        await client.resume()
        await client.close()
        aborts = [body for path, body in server.calls if path == "/abort_request"]
    assert aborts == [{"rid": "r."}, {"rid": "r."}]


async def test_an_abort_hits_no_request_whose_id_begins_alike() -> None:
    async with ScriptedServer(_counting) as server:
        client = EngineClient(server.url)
        server.holds_at = 2
        first, *others = [
            asyncio.create_task(client.generate(request(f"s-{name}", [9]))) for name in ("1", "10", "1-0")
        ]
        await until(lambda: [len(state.tokens) for state in server.running.values()] == [2] * 3)
        first.cancel()
        await until(lambda: any(path == "/abort_request done" for path, _ in server.calls))
        server.holds_at = None
        done = await asyncio.gather(*others)
        await asyncio.gather(first, return_exceptions=True)
        await client.close()
        assert len(_generations(server)) == 3
        assert [body for path, body in server.calls if path == "/abort_request"] == [{"rid": "s-1."}]
    assert all(d.tokens.tolist() == list(range(10, 18)) for d in done)


@pytest.mark.parametrize(("kind", "error"), [("no_logprobs", "missing_logprobs"), ("dropped_stop", "")])
async def test_damaged_replies(kind: str, error: str) -> None:
    async with ScriptedServer(_counting) as server:
        server.faults.append(Fault(kind))
        client = EngineClient(server.url)
        made = request("r", [9], stop_token_ids=(12,))
        if error:
            with pytest.raises(EngineError, match=error):
                await client.generate(made)
        else:
            assert (await client.generate(made)).tokens.tolist() == [10, 11, 12]
        await client.close()


@pytest.mark.parametrize("spans", [True, False])
async def test_a_stream_of_what_is_new_is_refused(spans: bool) -> None:
    """SGLang has a switch for it; the last event would pass for the whole answer."""
    async with ScriptedServer(_counting, spans=spans) as server:
        server.faults.append(Fault("deltas"))
        client = EngineClient(server.url)
        with pytest.raises(EngineError, match="incremental-streaming-output"):
            await client.generate(request("r", [9]), lambda _: None)
        await client.close()


async def test_tokens_made_before_a_label_change_keep_their_version() -> None:
    """The label moves while the reply is on the wire; also on servers that send no spans."""
    async with ScriptedServer(_counting) as server:
        client = EngineClient(server.url)
        server.holds_at = 2
        task = asyncio.create_task(client.generate(request("r", [9], max_tokens=4)))
        await until(lambda: any(len(state.tokens) == 2 for state in server.running.values()))
        await client.set_version(V11)
        server.holds_at = None
        done = await task
        await client.close()
        assert ("/update_weight_version", {"new_version": "1.1", "abort_all_requests": False}) in server.calls
    assert [s.version for s in done.spans] == [V10, V11]


@pytest.mark.parametrize("pauses", [True, False])
async def test_servers_without_spans_need_the_abort_mode(pauses: bool) -> None:
    async with ScriptedServer(_counting, spans=False, pauses=pauses) as server:
        client = EngineClient(server.url, pause_mode="abort")
        assert not await client.names_versions(60.0)
        server.holds_at = 3
        task = asyncio.create_task(client.generate(request("r", [9], max_tokens=8)))
        await until(lambda: any(len(state.tokens) == 3 for state in server.running.values()))
        await client.pause()
        server.holds_at = None
        await asyncio.sleep(0.05)  # what is asked in the pause would be made with the old weights
        await client.update_from_disk("new", V11)
        await client.resume()
        done = await task
        await client.close()
    assert done.tokens.tolist() == list(range(10, 18))
    assert [s.version for s in done.spans] == [V10, V11]


class _Answers(deque[tuple[int, str]]):
    """Each takes 200 s by the loop's clock."""

    def __init__(self, answers: Sequence[tuple[int, str]], move: Callable[[float], None]) -> None:
        super().__init__(answers)
        self._move = move

    def popleft(self) -> tuple[int, str]:
        self._move(200.0)
        return super().popleft()


async def test_a_request_that_comes_after_the_pause_that_should_abort_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server holds it back until it may go on, and finds it by no abort."""
    monkeypatch.setattr("agentrl.engine.client._ABORT_AGAIN", 0.05)
    async with ScriptedServer(_counting, spans=False) as server:
        first, client = EngineClient(server.url), EngineClient(server.url, pause_mode="abort")
        server.holds_at = 2
        await first.pause()  # as if the client's own were there before its request
        task = asyncio.create_task(client.generate(request("r", [9], max_tokens=8)))
        await until(lambda: _generations(server))
        await client.pause()
        assert not server.running
        server.holds_at = None
        await client.update_from_disk("new", V11)
        await client.resume()
        done = await task
        await first.close()
        await client.close()
    assert done.tokens.tolist() == list(range(10, 18))
    assert done.spans[-1].version == V11


async def test_updates_refused_for_pending_requests_back_off_within_bounds() -> None:
    answers = [(400, "flush refused: pending requests")] * 3
    async with ScriptedServer(_counting, update_answers=answers) as server:
        client = EngineClient(server.url)
        await client.update_from_disk("new", V11)
        assert client.version == V11
        server.update_answers = _Answers(answers * 100, clock())
        short = EngineClient(server.url, load_timeout=900.0)
        with pytest.raises(EngineError, match="pending"):
            await short.update_from_disk("newer", Version(1, 2))
        assert len(server.update_answers) == 300 - 5
        assert (await short.model_info()).version == V11
        await client.close()
        await short.close()


@pytest.mark.parametrize("chunk", [1, 3, 256])
async def test_chunks_are_exact(chunk: int) -> None:
    async with ScriptedServer(_counting) as server:
        client = EngineClient(server.url, chunk_tokens=chunk)
        done = await client.generate(request("r", [9], max_tokens=8))
        stopped = await client.generate(request("r", [9], max_tokens=8, stop_token_ids=(13,)))
        await client.close()
    assert (done.tokens.tolist(), done.finish) == (list(range(10, 18)), "length")
    assert (stopped.tokens.tolist(), stopped.finish, stopped.matched) == ([10, 11, 12, 13], "stop", 13)


async def test_weights_that_do_not_fit_are_not_offered(tmp_path: Path) -> None:
    from tests.engine.kit import vivid_model

    model = vivid_model(tmp_path / "model", 0)
    other = vivid_model(tmp_path / "other", 0, hidden=32)
    async with ScriptedServer(_counting) as server:
        client = EngineClient(server.url, model_dir=model)
        with pytest.raises(EngineError, match="shape"):
            await client.update_from_disk(other, V11)
        assert server.calls == []
        await client.update_from_disk(model, V11)
        await client.close()
