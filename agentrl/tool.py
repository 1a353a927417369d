"""Tools: a typed Python function becomes something that a model can call.

```python
@tool
async def calc(expression: str) -> str:
    \"\"\"Work out an arithmetic expression.

    Args:
        expression: digits, + - * / and brackets
    \"\"\"
    return str(calculate(expression))

messages = await run_tools([calc], action)     # one `tool` message for each call in the action, in its order
```

Whatever the model does wrong is an observation for it: an unknown name, arguments that are no JSON or do not fit, an
exception in the function, a timeout. An `InfrastructureError` is nobody's answer and passes through.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from agentrl.calling import asked_to_stop, call
from agentrl.errors import ContractError, InfrastructureError

# `import agentrl` imports this module: pydantic and numpy wait until there is a tool.
if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentrl.types import Message

DEFAULT_TIMEOUT = 30.0


class TimedOut(TimeoutError):
    """A tool took longer than it may."""


class Tool:
    """A function with a name, an OpenAI schema and validated arguments. Make one with `@tool`.

    In a class body it binds like a method, so that a tool may use the state of its episode: `self.tools = (self.buy,)`.
    A plain `def` runs in a thread, because it may block; an `async def` runs in the event loop and must not.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        if timeout <= 0:
            raise ContractError(f"tool {function.__name__}: timeout={timeout} must be > 0 seconds")
        self.function = function
        self.name = name or function.__name__
        self.timeout = timeout
        doc = inspect.getdoc(function)
        if not doc:
            raise ContractError(
                f"tool {self.name!r} has no docstring: it is what tells the model when to call the tool"
            )
        summary, fields = _read_docstring(doc)
        self.arguments: type[BaseModel] | None = _arguments_model(function, self.name, fields)
        self.schema = _schema(self.name, summary, _parameters(self.arguments))

    @classmethod
    def described(
        cls,
        name: str,
        description: str,
        parameters: dict[str, Any],
        function: Callable[..., Any],
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Tool:
        """A tool whose JSON schema comes from elsewhere, an MCP server for one: `function` checks its arguments itself
        and takes them as keywords."""
        made = object.__new__(cls)
        made.function, made.name, made.timeout, made.arguments = function, name, timeout, None
        made.schema = _schema(name, description, parameters)
        return made

    def __get__(self, instance: object | None, owner: type | None = None) -> Tool:
        """The same tool, bound to the object it is read from."""
        if instance is None:
            return self
        bound = object.__new__(Tool)
        bound.__dict__.update(self.__dict__)
        bound.function = self.function.__get__(instance, owner)
        return bound

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function's types say, defaults filled in; ValidationError where they do not fit."""
        if self.arguments is None:
            return arguments
        found = self.arguments.model_validate(arguments)
        return {str(field.alias): getattr(found, name) for name, field in type(found).model_fields.items()}

    async def __call__(self, **arguments: Any) -> Any:
        """Check the arguments, then run. Raises what the function raises, ValidationError, TimeoutError."""
        values = self.checked(arguments)
        clock = asyncio.timeout(self.timeout)
        try:
            async with clock:
                if inspect.iscoroutinefunction(self.function):
                    return await self.function(**values)
                # Each in a thread of its own: of the loop's there are few, and waiting for one would count as its time.
                return await call(functools.partial(self.function, **values))
        except TimeoutError as error:
            if clock.expired():
                raise TimedOut(f"{self.name} did not finish within {self.timeout:g} s") from error
            raise  # the function's own, a socket's for one


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: float = DEFAULT_TIMEOUT
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a `Tool` of a typed function with a docstring; usable with and without brackets.

    `timeout` is in seconds. A plain function that runs out of it goes on in its thread: give work that may hang a
    deadline of its own, or a sandbox.
    """
    if function is not None:
        return Tool(function)
    return lambda function: Tool(function, name=name, timeout=timeout)


async def run_tools(tools: Sequence[Tool], action: Message) -> list[Message]:
    """Run all calls of an assistant message in parallel; returns one `tool` message a call, in the calls' order.

    Raises InfrastructureError where a tool did (a lost sandbox, say), after stopping the other calls.
    """
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) != len(tools):
        raise ContractError(f"two tools share a name: {sorted(tool.name for tool in tools)}; names must be unique")
    tasks = [asyncio.ensure_future(_answer(by_name, call)) for call in action.get("tool_calls") or []]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _answer(by_name: dict[str, Tool], call: Any) -> Message:
    call = call if isinstance(call, dict) else {}
    function = call["function"] if isinstance(call.get("function"), dict) else {}
    text = await _call(by_name, str(function.get("name")), function.get("arguments"))
    return {"role": "tool", "tool_call_id": call.get("id") or "", "content": text}


async def _call(by_name: dict[str, Tool], name: str, raw: object) -> str:
    if name not in by_name:
        return f"error: there is no tool {name!r}; there are: {', '.join(sorted(by_name)) or 'none'}"
    try:
        if raw in ("", "null", None) and not by_name[name].schema["function"]["parameters"].get("required"):
            raw = {}  # how many engines write a call without arguments
        arguments = json.loads(raw, strict=False) if isinstance(raw, str) else raw
    except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, brackets without end
        return f"error: the arguments of {name} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {name} must be a JSON object, got {type(arguments).__name__}"
    from pydantic import ValidationError

    chosen = by_name[name]
    try:
        return _shown(await chosen(**arguments))
    except InfrastructureError:
        raise
    except ValidationError as error:
        return f"error: bad arguments for {name}: " + "; ".join(_problem(e) for e in error.errors())
    except TimedOut as error:
        return f"error: {error}"
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # The border between user code and the model: its exceptions are the tool's answer, an `exit()` too.
        if asked_to_stop(error):
            raise
        return f"error: {type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # user code as well
        return f"(no text: {type(second).__name__})"


def _shown(result: Any) -> str:
    """A result as text: bytes as UTF-8, everything but text as JSON."""
    if isinstance(result, bytes):
        return result.decode(errors="replace")
    if isinstance(result, str):
        # Half of a surrogate pair is no text that could be sent on.
        return result.encode(errors="replace").decode()
    from pydantic_core import to_json

    return to_json(result, fallback=str, bytes_mode="base64", inf_nan_mode="strings").decode()


def _problem(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}"


def _arguments_model(function: Callable[..., Any], name: str, docs: dict[str, str]) -> type[BaseModel]:
    from pydantic import ConfigDict, Field, PydanticUserError, create_model

    fields: dict[str, Any] = {}
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        raise ContractError(
            f"tool {name!r}: {error}; types must be known where the module is: import them there"
        ) from error
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ContractError(f"tool {name!r}: {parameter} cannot be described in a schema; name each argument")
        if parameter.annotation is parameter.empty:
            raise ContractError(f"tool {name!r}: argument {parameter.name!r} has no type, so the model is not told one")
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias: pydantic keeps names such as `schema`, `copy` and `_x` for itself.
        described = Field(default, alias=parameter.name, description=docs.get(parameter.name))
        fields[f"argument{len(fields)}"] = (parameter.annotation, described)
    try:
        return create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise ContractError(f"tool {name!r}: its arguments cannot be described in a schema: {error}") from error


def _schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _parameters(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    del schema["title"]
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description, and what a Google-style `Args:` section says of each argument."""
    summary, _, rest = doc.partition("\nArgs:\n")
    fields: dict[str, str] = {}
    current = None
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        if entry := re.match(r" {1,4}(\w+)(?: \([^)]*\))?: (.*)", line):
            current = entry[1]
            fields[current] = entry[2].strip()
        elif current and line.strip():
            fields[current] += " " + line.strip()
    return summary.split("\nReturns:\n")[0].strip(), fields
