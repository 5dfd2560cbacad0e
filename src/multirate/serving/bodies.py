"""The bodies of requests. Values have to be of JSON's own types: "0.5" is no number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

Count = Annotated[int, Field(ge=0)]
Choices = Annotated[list[str], Field(min_length=1)]


class Body(BaseModel):
    """What a client may send. Further fields are ignored, and logged once."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    def unknown(self) -> list[str]:
        """The fields that nobody reads."""
        return sorted(self.model_extra or {})


class Part(BaseModel):
    """Part of a body."""

    model_config = ConfigDict(strict=True)


class StreamOptions(Part):
    include_usage: bool = False


class Speculative(Part):
    """How a request drafts."""

    method: str | None = None
    n_max: Count | None = None


class Prediction(Part):
    type: Literal["content"]
    content: str | list[dict[str, Any]]


class JsonSchema(Part):
    name: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """vLLM's way to ask for a form. One of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class Sampled(Body):
    """What completions and chats have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    max_tokens: Count | None = None
    prediction: Prediction | None = None
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def answers(self) -> int:
        """How many answers are asked for, counted before anything is tokenised."""
        return self.n or 1


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of these. Each kind is checked once, as lists may be long."""
    several = value if isinstance(value, list) else [value]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return [value]
    for one in several:
        ids = isinstance(one, list) and all(type(token) is int for token in one)
        if not isinstance(one, str) and not ids:
            raise ValueError("accepted: a text, a list of token ids, or a list of these")
    if not several:
        raise ValueError("it is empty")
    return several


class CompletionBody(Sampled):
    prompt: Annotated[Any, PlainValidator(_prompts)]
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def answers(self) -> int:
        return len(self.prompt) * (self.n or 1)


class FunctionSpec(Part):
    """A tool. The chat template gets all its fields."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Part):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Message(Part):
    """One turn. Further fields reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(Sampled):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_origins: bool | None = None


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Part):
    format: TextFormat | None = None


class FlatTool(FunctionSpec):
    """A tool as the Responses API writes it."""

    type: Literal["function"]


class FlatNamedTool(Part):
    type: Literal["function"]
    name: str


class ResponsesBody(Body):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    prediction: Prediction | None = None
    speculative: Speculative | None = None
    seed: int | None = None

    @property
    def answers(self) -> int:
        return 1


class TokenizeBody(Body):
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    tokens: list[int]
    skip_special_tokens: bool = False
