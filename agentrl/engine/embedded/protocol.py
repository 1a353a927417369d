"""What the embedded engine's routes are sent, in SGLang's names; anything that is not computed here is refused."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


Body = TypeVar("Body", bound=BaseModel)


_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


class SamplingParams(_Strict):
    """SGLang's sampling parameters, as far as they are computed here; any other is refused, grammars by name."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    skip_special_tokens: bool = False
    """Accepted for the protocol's sake: replies hold ids and no text."""
    stream_interval: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _no_grammar(cls, given: Any) -> Any:
        found = [name for name in _GRAMMARS if isinstance(given, dict) and given.get(name) is not None]
        if found:
            raise ValueError(
                f"{found[0]}: the embedded engine has no grammars. Leave the grammar (response_format) out, or set "
                "engine.kind = 'sglang'"
            )
        return given


class GenerateBody(_Strict):
    """`POST /generate`."""

    input_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = True
    top_logprobs_num: int = Field(0, ge=0, le=64)
    rid: str | None = None
    stream: bool = False


class UpdateBody(_Strict):
    """`POST /update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class PauseBody(_Strict):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"]


class AbortBody(_Strict):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


class LabelBody(_Strict):
    """`POST /update_weight_version`."""

    new_version: str
    abort_all_requests: bool = True


class CheckBody(_Strict):
    """`POST /weights_checker`."""

    action: Literal["checksum"] = "checksum"


class JoinBody(_Strict):
    """`POST /init_weights_update_group`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "gloo"


class LeaveBody(_Strict):
    """`POST /destroy_weights_update_group`."""

    group_name: str


class BucketBody(_Strict):
    """`POST /update_weights_from_distributed`: tensors' bytes end to end."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: str = "flattened_bucket"
    flush_cache: bool = True
    weight_version: str | None = None
    abort_all_requests: bool = False


async def read(request: web.Request, kind: type[Body]) -> Body:
    """The request's body; pydantic's ValidationError where it is none of `kind`."""
    return kind.model_validate_json(await request.read() or b"{}")


def answer(value: dict[str, Any], status: int = 200) -> web.Response:
    """As JSON."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
