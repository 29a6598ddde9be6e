"""The request bodies of this dialect, field by field: each class is the one declaration of its endpoint.

Types are read the lax way (`"3"` and `3.0` are integers, `"yes"` is a boolean); unknown keys are errors
everywhere except inside content parts, tool calls and free objects. Rules that need more than one field
or the served model are in `schema` (before the types), `sampling` and `messages` (after them).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from gateway.dialects.fields import Rule

# One bad element is enough to know: a list of a million wrong ones must not become a million errors.
IdList = Annotated[list[int], Field(fail_fast=True)]
TextList = Annotated[list[str], Field(fail_fast=True)]
IdLists = Annotated[list[IdList], Field(fail_fast=True)]
PromptValue = str | IdList | TextList | IdLists

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Seed = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
AtLeastOne = Annotated[int, Field(ge=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


# --- messages -----------------------------------------------------------------------------------------


class Part(TypedDict):
    """A piece of content. What further keys mean is decided when the conversation is made."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str


Content = str | Annotated[list[Part], Field(fail_fast=True)]


class Message(TypedDict):
    """A turn of any role."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: str
    content: NotRequired[Content]
    name: NotRequired[str | None]


class FunctionCall(TypedDict):
    """The function of a call made earlier."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call made earlier."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """An earlier answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["assistant"]
    content: NotRequired[Content | None]
    name: NotRequired[str | None]
    refusal: NotRequired[str | None]
    function_call: NotRequired[FunctionCall | None]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(fail_fast=True)] | None]


class ToolMessage(TypedDict):
    """What a tool returned."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["tool"]
    content: Content
    tool_call_id: str


class FunctionMessage(TypedDict):
    """What a function returned, in the older spelling."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: Literal["function"]
    content: Content | None
    name: str


def _shape(message: Any) -> str:
    """The shape that a message is held against.

    Every role may use the common shape, so a special shape is chosen only where it allows more.
    """
    if isinstance(message, dict):
        role = message.get("role")
        if role == "assistant":
            return "assistant"
        if role == "tool" and "tool_call_id" in message:
            return "tool"
        if role == "function" and "content" in message and message["content"] is None:
            return "function"
    return "message"


AnyMessage = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[FunctionMessage, Tag("function")],
    Discriminator(_shape),
]
MessageList = Annotated[list[AnyMessage], Field(fail_fast=True)]


# --- nested objects -----------------------------------------------------------------------------------


class StreamOptions(_Body):
    """What a stream says about usage."""

    include_usage: Annotated[
        bool | None,
        Rule(
            "Adds a last chunk with the usage of the whole request.",
            ("chat-stream-include-usage-true", "chat-stream-include-usage-false"),
        ),
    ] = True
    continuous_usage_stats: Annotated[
        bool | None,
        Rule(
            "Puts the numbers so far into every chunk; without effect when include_usage is off.",
            ("chat-stream-usage-final-only", "comp-stream-empty-options"),
        ),
    ] = True


class ResponseFormat(_Body):
    """The form of the answer."""

    type: Annotated[
        Literal["text", "json_object"],
        Rule(
            "json_object: the answer is a JSON object or array; text: anything.",
            ("rf-json-object-start", "rf-json-schema", "rf-unknown"),
        ),
    ]


class FunctionDefinition(_Body):
    """A function that the model may be told of."""

    name: Annotated[
        str,
        Rule("Name of the function; tool_choice refers to it.", ("tool-named-empty-tools",)),
    ]
    description: Annotated[
        str | None,
        Rule("Handed to the chat template.", ("test_tools_reach_the_template_whole",)),
    ] = None
    parameters: Annotated[
        dict[str, Any] | None,
        Rule(
            "JSON schema of the arguments: handed to the chat template, and enforced when this tool is"
            " the named one. Absent or {} enforces nothing.",
            ("test_named_tool_enforces_its_parameters", "test_tools_reach_the_template_whole"),
        ),
    ] = None


class Tool(_Body):
    """A tool that the model may be told of."""

    type: Annotated[
        Literal["function"],
        Rule("Only functions exist.", ("test_only_functions_are_tools",)),
    ] = "function"
    function: Annotated[
        FunctionDefinition,
        Rule(
            "The function; further keys such as strict are refused.", ("extra-nested-tool-strict",)
        ),
    ]


class NamedFunction(_Body):
    """The function that must be called."""

    name: Annotated[
        str,
        Rule("Name of one of the tools.", ("tool-named-empty-tools", "tool-named-stream")),
    ]


class NamedToolChoice(_Body):
    """The tool that must be called."""

    function: Annotated[
        NamedFunction,
        Rule("The function that the answer is a call of.", ("tool-named-stream",)),
    ]
    type: Annotated[
        Literal["function"],
        Rule("Only functions exist.", ("test_only_functions_are_tools",)),
    ] = "function"


# --- rules that chat and completions share ------------------------------------------------------------

ModelName = Annotated[
    str,
    Rule(
        "Name of a served model, or one of its aliases; anything else is a 404.",
        ("model-404-completion", "model-404-empty", "infra-alias-accepted-chat"),
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    Rule(
        "Taken from a token's logit for each time it occurs in the output so far. Null means 0.",
        ("range-frequency_penalty-141", "pen-frequency-alternates"),
        "-2 to 2",
    ),
]
PresencePenalty = Annotated[
    float | None,
    Rule(
        "Taken from the logit of every token that occurs in the output so far; the prompt does not"
        " count. Null means 0.",
        (
            "range-presence_penalty-139",
            "range-presence_penalty-140",
            "pen-presence-not-on-prompt",
        ),
        "-2 to 2",
    ),
]
RepetitionPenalty = Annotated[
    float,
    Rule(
        "Divides positive and multiplies negative logits of every token in prompt or output.",
        (
            "range-repetition_penalty-142",
            "range-repetition_penalty-143",
            "pen-repetition-on-prompt",
        ),
        "above 0, to 2",
    ),
]
LogitBias = Annotated[
    dict[str, float] | None,
    Rule(
        "Added to the logits of the tokens with these ids; values are clamped to -100 to 100. Added"
        " tokens (chat markers) cannot be biased.",
        (
            "bias-force",
            "range-logit_bias-157",
            "range-logit_bias-159",
            "range-logit-bias-clamp-ok",
        ),
        "keys: ids of the base vocabulary",
    ),
]
Seed_ = Annotated[
    Seed | None,
    Rule(
        "Makes sampling repeatable. -1 and null mean no seed.",
        ("det-seed", "type-seed-too-big"),
        "64-bit integers",
    ),
]
Stop = Annotated[
    str | TextList | None,
    Rule(
        "Generation ends at the first of these strings that appears; any number of them. Null means none.",
        ("stop-string", "range-stop-152", "type-stop-number"),
        "no empty string",
    ),
]
StopTokenIds = Annotated[
    IdList | None,
    Rule(
        "Generation ends at these tokens. Ids that no token has are harmless.",
        ("stop-token-id-stream", "stop-min-tokens"),
    ),
]
Stream = Annotated[
    bool | None,
    Rule("Sends the answer as server-sent events.", ("chat-stream-basic", "comp-stream-basic")),
]
StreamOptions_ = Annotated[
    StreamOptions | None,
    Rule(
        "Only together with stream; an empty object means its defaults and is always allowed.",
        (
            "so-without-stream-completion",
            "so-empty-without-stream-ok",
            "comp-stream-empty-options",
        ),
    ),
]
Temperature = Annotated[
    float | None,
    Rule(
        "Divides the logits. 0 is greedy; above 0, values below 0.01 count as 0.01. Null means 1.",
        ("range-temperature-132", "range-temperature-high-ok", "lp-temperature-scaled"),
        "0 and above",
    ),
]
TopP = Annotated[
    float | None,
    Rule(
        "Keeps the most likely tokens that together reach this probability. Null means 1.",
        ("range-top_p-133", "det-greedy-ignores-top-p"),
        "above 0, to 1",
    ),
]
TopK = Annotated[
    int,
    Rule(
        "Keeps this many of the most likely tokens; -1, and more than the vocabulary has, keep all."
        " 0 is refused.",
        ("range-top_k-136", "type-top_k-null", "type-top_k-fraction"),
        "-1, or 1 and above",
    ),
]
MinP = Annotated[
    float,
    Rule(
        "Drops tokens less likely than this share of the most likely one.",
        ("range-min_p-138", "type-min_p-null"),
        "0 to 1",
    ),
]
BestOf = Annotated[
    int | None,
    Rule(
        "Generates so many candidates and returns the n best. Null and 0 mean n.",
        ("range-best_of-150", "range-best_of-151", "comp-stream-best-of"),
        "n and above; 1 when greedy; above 1 with beam search",
    ),
]
UseBeamSearch = Annotated[
    bool,
    Rule(
        "Searches with best_of beams; needs temperature 0, top_p 1 and top_k -1.",
        ("range-use_beam_search-156", "range-beam-temp-default", "range-beam-top-p"),
    ),
]
LengthPenalty = Annotated[
    float,
    Rule(
        "Power of the length that divides a beam's score.",
        ("test_rules_in_order", "test_changing_a_field_changes_the_outcome"),
        "1 unless use_beam_search",
    ),
]
EarlyStopping = Annotated[
    bool,
    Rule(
        "Ends beam search as soon as best_of beams have ended.",
        ("range-early_stopping-155",),
        "false unless use_beam_search",
    ),
]
IncludeStop = Annotated[
    bool,
    Rule(
        "Keeps the stop string in the text, and the text of a stop token.",
        ("stop-include", "stop-include-partial-token"),
    ),
]
IgnoreEos = Annotated[
    bool,
    Rule("Generation goes on behind the end-of-sequence token.", ("stop-ignore-eos",)),
]
MinTokens = Annotated[
    int,
    Rule(
        "Nothing can end the generation before so many tokens.",
        ("stop-min-tokens", "range-min_tokens-144"),
        "0 to max_tokens",
    ),
]
SkipSpecial = Annotated[
    bool,
    Rule(
        "Leaves special tokens out of the text.",
        ("stop-special-token-text", "test_changing_a_field_changes_the_outcome"),
    ),
]
SpacesBetween = Annotated[
    bool,
    Rule(
        "Puts spaces between special tokens in the text; tokenizers of today have none to put.",
        ("test_changing_a_field_changes_the_outcome",),
    ),
]
TruncatePrompt = Annotated[
    AtLeastOne | None,
    Rule(
        "Keeps the last so many tokens of the prompt.",
        ("chat-truncate", "prompt-truncate-ids", "prompt-truncate-echo-text"),
        "1 and above",
    ),
]
PromptLogprobs = Annotated[
    int | None,
    Rule(
        "Log probabilities of the prompt's tokens, with so many alternatives each.",
        ("comp-prompt-logprobs", "chat-prompt-logprobs", "lp-prompt-negative"),
        "0 to the server's limit; with stream only 0",
    ),
]
ResponseFormat_ = Annotated[
    ResponseFormat | None,
    Rule(
        "Form of the answer; any guided field comes before it.",
        ("rf-json-object-start", "extra-nested-response-format"),
    ),
]
GuidedJson = Annotated[
    str | dict[str, Any] | None,
    Rule(
        "JSON schema, as an object or as JSON text, that the answer follows. {} and an empty text mean"
        " none.",
        ("guided-json-bad-string", "guided-empty-json-ignored", "guided-two-completion"),
        "a JSON object; one of guided_json, guided_regex, guided_choice at most",
    ),
]
GuidedRegex = Annotated[
    str | None,
    Rule(
        "Regular expression that the whole answer matches. An empty text means none.",
        ("guided-two", "test_first_guided_field_wins"),
        "one of guided_json, guided_regex, guided_choice at most",
    ),
]
GuidedChoice = Annotated[
    TextList | None,
    Rule(
        "The answer is exactly one of these strings.",
        ("guided-choice", "guided-empty-choice-ignored"),
        "not empty; one of guided_json, guided_regex, guided_choice at most",
    ),
]
GuidedGrammar = Annotated[
    str | None,
    Rule(
        "Grammar in Lark notation that the answer follows; the other guided fields come before it. An empty"
        " text means none.",
        ("test_first_guided_field_wins",),
    ),
]
GuidedBackend = Annotated[
    str | None,
    Rule(
        "Name of the guiding engine. Both names mean the one engine that there is; any other is refused.",
        ("order-backend-before-ctx", "order-template-before-backend"),
        "outlines or lm-format-enforcer",
    ),
]
GuidedWhitespace = Annotated[
    str | None,
    Rule(
        "Regular expression for the white space between JSON tokens; used with guided_json and named tools.",
        ("test_whitespace_pattern_goes_with_the_schema",),
    ),
]
User = Annotated[
    str | None,
    Rule(
        "Name of the end user; never changes an answer.",
        ("test_accepted_fields_change_nothing", "det-spelled-defaults"),
        status="accepted",
    ),
]


# --- bodies -------------------------------------------------------------------------------------------


class ChatRequest(_Body):
    """POST /v1/chat/completions"""

    messages: Annotated[
        MessageList,
        Rule(
            "The conversation. Text parts are joined with line breaks, turns without content are left out;"
            " only role and content reach the template.",
            ("chat-parts-joined", "chat-null-assistant-dropped", "type-messages-string"),
            "at least one; no key outside the role's own",
        ),
    ]
    model: ModelName
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias = None
    logprobs: Annotated[
        bool | None,
        Rule(
            "Adds log probabilities of the generated tokens.",
            ("chat-lp-true-no-top", "chat-lp-false-null", "type-logprobs-int-chat"),
        ),
    ] = False
    top_logprobs: Annotated[
        int | None,
        Rule(
            "So many alternatives per token. Null means 0.",
            (
                "chat-lp-top2",
                "chat-lp-topnull",
                "lp-top-21",
                "lp-top-negative",
                "lp-top-without-logprobs",
            ),
            "0 to the server's limit; needs logprobs, even for 0",
        ),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Rule(
            "Most tokens to generate. Null means what the prompt leaves of the context.",
            ("range-max_tokens-147", "chat-default-rest-of-context", "order-backend-before-ctx"),
            "1 to what the prompt leaves of the context",
        ),
    ] = None
    n: Annotated[
        int | None,
        Rule(
            "Number of choices. Null means 1.",
            ("chat-n2", "range-n-148", "range-n-149", "type-n-null-chat-ok"),
            "1 and above; 1 when greedy",
        ),
    ] = 1
    presence_penalty: PresencePenalty = 0.0
    response_format: ResponseFormat_ = None
    seed: Seed_ = None
    stop: Stop = Field(default_factory=list)
    stream: Stream = False
    stream_options: StreamOptions_ = None
    temperature: Temperature = 0.7
    top_p: TopP = 1.0
    tools: Annotated[
        Annotated[list[Tool], Field(fail_fast=True)] | None,
        Rule(
            "Handed to the chat template; with a named tool_choice the answer is a call of that tool.",
            ("tool-tools-without-choice", "tool-choice-none-ok", "extra-nested-tool-strict"),
        ),
    ] = None
    tool_choice: Annotated[
        Literal["none"] | NamedToolChoice | None,
        Rule(
            "A named tool makes the answer a call of it. Null means none; auto and required are refused.",
            ("tool-named-stream", "tool-choice-auto", "tool-choice-null", "tool-choice-f"),
            "none, or a tool out of tools and no guided field",
        ),
    ] = "none"
    user: User = None
    best_of: BestOf = None
    use_beam_search: UseBeamSearch = False
    top_k: TopK = -1
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    length_penalty: LengthPenalty = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: IgnoreEos = False
    min_tokens: MinTokens = 0
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    skip_special_tokens: SkipSpecial = True
    spaces_between_special_tokens: SpacesBetween = True
    truncate_prompt_tokens: TruncatePrompt = None
    prompt_logprobs: PromptLogprobs = None
    echo: Annotated[
        bool,
        Rule(
            "Puts the last turn in front of the answer when its role is the answer's; also reports the"
            " prompt's log probabilities when not streaming.",
            ("chat-echo-same-role",),
        ),
    ] = False
    add_generation_prompt: Annotated[
        bool,
        Rule(
            "Whether the template opens the assistant's turn; if not, the answer has the last turn's role.",
            (
                "chat-stream-agp-false",
                "flag-response-role-agp-false",
                "test_changing_a_field_changes_the_outcome",
            ),
        ),
    ] = True
    add_special_tokens: Annotated[
        bool,
        Rule(
            "Whether the tokenizer adds its special tokens on top of the template's.",
            ("test_changing_a_field_changes_the_outcome",),
        ),
    ] = False
    include_stop_str_in_output: IncludeStop = False
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    guided_decoding_backend: GuidedBackend = None
    guided_whitespace_pattern: GuidedWhitespace = None
    documents: Annotated[
        Annotated[list[dict[str, str]], Field(fail_fast=True)] | None,
        Rule(
            "Handed to the chat template as `documents`.",
            ("test_changing_a_field_changes_the_outcome",),
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Rule(
            "Jinja template that replaces the server's and the model's. An empty text means none.",
            ("chat-kwargs", "order-model-before-template"),
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Rule(
            "Further variables of the template.",
            ("chat-kwargs",),
            "no name that the template has anyway",
        ),
    ] = None


class CompletionRequest(_Body):
    """POST /v1/completions"""

    model: ModelName
    prompt: Annotated[
        PromptValue,
        Rule(
            "A text, token ids, or a list of either; ids are used as they are.",
            ("prompt-list-n2", "prompt-mixed", "prompt-number", "prompt-empty-list"),
            "at least one prompt, none of them empty; ids of the vocabulary",
        ),
    ]
    best_of: BestOf = None
    echo: Annotated[
        bool | None,
        Rule(
            "Puts the prompt in front of each choice, with logprobs where those are asked for.",
            ("comp-echo", "comp-echo-max0", "comp-stream-echo-broken"),
        ),
    ] = False
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias = None
    logprobs: Annotated[
        int | None,
        Rule(
            "Adds log probabilities of the generated tokens, with so many alternatives each.",
            ("comp-logprobs-0", "comp-logprobs-offsets", "comp-stream-logprobs"),
            "0 to the server's limit",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Rule(
            "Most tokens to generate. Null means 16.",
            (
                "ctx-completion",
                "ctx-completion-edge-ok",
                "comp-max-tokens-null",
                "comp-max0-no-echo",
            ),
            "1 to what the prompt leaves of the context; 0 with echo",
        ),
    ] = 16
    n: Annotated[
        int,
        Rule(
            "Number of choices per prompt.",
            ("prompt-list-n2", "type-n-null-completion"),
            "1 and above; 1 when greedy",
        ),
    ] = 1
    presence_penalty: PresencePenalty = 0.0
    seed: Seed_ = None
    stop: Stop = Field(default_factory=list)
    stream: Stream = False
    stream_options: StreamOptions_ = None
    suffix: Annotated[
        str | None,
        Rule(
            "Text behind the insertion; not offered.",
            ("range-suffix", "range-suffix-null-ok"),
            "null",
            status="refused",
        ),
    ] = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    user: User = None
    use_beam_search: UseBeamSearch = False
    top_k: TopK = -1
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    length_penalty: LengthPenalty = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: IgnoreEos = False
    min_tokens: MinTokens = 0
    skip_special_tokens: SkipSpecial = True
    spaces_between_special_tokens: SpacesBetween = True
    truncate_prompt_tokens: TruncatePrompt = None
    allowed_token_ids: Annotated[
        IdList | None,
        Rule(
            "Only these tokens can be generated; added tokens (chat markers) cannot be among them.",
            ("allowed-force", "range-allowed-empty"),
            "not empty; ids of the base vocabulary",
        ),
    ] = None
    prompt_logprobs: PromptLogprobs = None
    include_stop_str_in_output: IncludeStop = False
    add_special_tokens: Annotated[
        bool,
        Rule(
            "Whether the tokenizer adds its special tokens to text prompts.",
            ("prompt-add-special-tokens-false",),
        ),
    ] = True
    response_format: ResponseFormat_ = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    guided_decoding_backend: GuidedBackend = None
    guided_whitespace_pattern: GuidedWhitespace = None


class EmbeddingRequest(_Body):
    """POST /v1/embeddings"""

    model: Annotated[
        str,
        Rule(
            "Name of a served embedding model; the answer repeats it as it was asked for.",
            ("emb-float", "emb-model-before-dimensions", "emb-disabled-before-model"),
        ),
    ]
    input: Annotated[
        PromptValue,
        Rule(
            "A text, token ids, or a list of either.",
            ("emb-float", "emb-ids", "emb-empty"),
            "at least one, each no longer than the context; ids of the vocabulary",
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"],
        Rule(
            "float: numbers; base64: their little-endian float32 bytes.",
            ("emb-base64", "emb-bad-format", "emb-null-format"),
        ),
    ] = "float"
    dimensions: Annotated[
        int | None,
        Rule(
            "Size of the vectors; not offered.",
            ("test_embedding_dimensions_are_refused",),
            "null",
            status="refused",
        ),
    ] = None
    user: User = None
    additional_data: Annotated[
        Any,
        Rule(
            "Data for the pooler; the pooler has no use for any.",
            ("test_accepted_fields_change_nothing",),
            status="accepted",
        ),
    ] = None


class TokenizeCompletionRequest(_Body):
    """POST /tokenize, for a text"""

    model: ModelName
    prompt: Annotated[
        str, Rule("One text.", ("tok-prompt-list", "tok-no-length-limit", "tok-none"))
    ]
    add_special_tokens: Annotated[
        bool,
        Rule(
            "Whether the tokenizer adds its special tokens: true for a prompt, false for messages unless"
            " said otherwise.",
            ("prompt-add-special-tokens-false", "test_changing_a_field_changes_the_outcome"),
        ),
    ] = True


class TokenizeChatRequest(_Body):
    """POST /tokenize, for a conversation"""

    model: ModelName
    messages: Annotated[
        MessageList,
        Rule("A conversation, rendered as chat renders it.", ("tok-chat",), "instead of prompt"),
    ]
    add_generation_prompt: Annotated[
        bool,
        Rule(
            "Whether the template opens the assistant's turn; only with messages.",
            ("tok-chat-agp-false", "tok-prompt-agp"),
        ),
    ] = True
    add_special_tokens: Annotated[
        bool,
        Rule(
            "Whether the tokenizer adds its special tokens on top of the template's.",
            ("test_changing_a_field_changes_the_outcome",),
        ),
    ] = False


class DetokenizeRequest(_Body):
    """POST /detokenize"""

    model: ModelName
    tokens: Annotated[
        IdList,
        Rule(
            "Token ids; special tokens are shown, ids that no token has vanish.",
            ("detok", "detok-missing"),
            "0 and above",
        ),
    ]


TokenizeRequest = TokenizeCompletionRequest | TokenizeChatRequest
GenerationRequest = ChatRequest | CompletionRequest
