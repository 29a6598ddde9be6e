"""The request bodies of this dialect: each class is the one declaration of its endpoint's fields.

Types are read the lax way (`"3"` and `3.0` are integers, `"yes"` is a boolean), fields are listed in the
order in which their errors are told. Rules that need more than one field or the served model are in
`schema` (before the types), `sampling` and `messages` (after them).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.dialects.fields import Rule
from gateway.dialects.vllm05.rules import (
    BestOf,
    EarlyStopping,
    FrequencyPenalty,
    GuidedBackend,
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    GuidedWhitespace,
    IgnoreEos,
    IncludeStop,
    LengthPenalty,
    LogitBias,
    MinP,
    MinTokens,
    ModelName,
    PresencePenalty,
    PromptLogprobs,
    RepetitionPenalty,
    ResponseFormatField,
    SeedField,
    SkipSpecial,
    SpacesBetween,
    Stop,
    StopTokenIds,
    Stream,
    StreamOptionsField,
    Temperature,
    TopK,
    TopP,
    TruncatePrompt,
    UseBeamSearch,
    User,
)
from gateway.dialects.vllm05.shapes import (
    MAX_IDS,
    MAX_KWARGS,
    Body,
    Document,
    IdList,
    MessageList,
    NamedToolChoice,
    PromptValue,
    Tool,
    at_most,
)


class ChatRequest(Body):
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
    response_format: ResponseFormatField = None
    seed: SeedField = None
    stop: Stop = Field(default_factory=list)
    stream: Stream = False
    stream_options: StreamOptionsField = None
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
        Annotated[list[Document], Field(fail_fast=True)] | None,
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
        at_most(MAX_KWARGS, "Variables of a template"),
        Rule(
            "Further variables of the template.",
            ("chat-kwargs",),
            "no name that the template has anyway",
        ),
    ] = None


class CompletionRequest(Body):
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
    seed: SeedField = None
    stop: Stop = Field(default_factory=list)
    stream: Stream = False
    stream_options: StreamOptionsField = None
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
    response_format: ResponseFormatField = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    guided_decoding_backend: GuidedBackend = None
    guided_whitespace_pattern: GuidedWhitespace = None


class EmbeddingRequest(Body):
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
            "As numbers, or as the base64 text of their little-endian float32 bytes.",
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


class TokenizeCompletionRequest(Body):
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


class TokenizeChatRequest(Body):
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


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: ModelName
    tokens: Annotated[
        IdList,
        at_most(MAX_IDS, "A list of token ids"),
        Rule(
            "Token ids; special tokens are shown, ids that no token has vanish.",
            ("detok", "detok-missing"),
            "0 and above",
        ),
    ]


TokenizeRequest = TokenizeCompletionRequest | TokenizeChatRequest
GenerationRequest = ChatRequest | CompletionRequest
