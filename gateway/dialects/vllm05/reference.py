"""What this dialect accepts, as data: the source of `GET /v1/compat` and of the reference page.

The fields themselves are declared in `requests`; here are the endpoints they belong to, the words the page
puts around them, and the points in which we chose not to do as the original did.
"""

from __future__ import annotations

from typing import Any

from gateway.dialects import fields
from gateway.dialects.fields import Declaration, Endpoint, Rule
from gateway.dialects.vllm05.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

NAME = "vllm-0.5"

ABOUT = (
    'The OpenAI layer of vLLM 0.5.5, field by field. Values are read the lax way: `"3"` and `3.0` are'
    ' integers, `"yes"` is a boolean. Every error is one flat object'
    ' `{"object":"error","message":…,"type":…,"param":null,"code":…}`; a body that fails its types gets'
    " the Python text of the list of everything that is wrong with it."
)

_UNKNOWN = (
    "Any other field, at the top level or inside stream_options, response_format, tools, tool_choice and"
    " messages, is a 400 that names it."
)
_NEVER_FIELDS = (
    "max_completion_tokens",
    "parallel_tool_calls",
    "store",
    "metadata",
    "service_tier",
    "reasoning_effort",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "continue_final_message",
    "bad_words",
    "truncation_side",
)


def _unknown(*proof: str) -> Rule:
    return Rule(_UNKNOWN, proof, status="refused")


def _lost(name: str, kind: str, roles: str) -> Declaration:
    says = f"Legal in {roles} and checked; no template sees it."
    rule = Rule(says, ("test_accepted_fields_change_nothing",), "", "accepted")
    return Declaration(f"messages.{name}", kind, None, rule)


_MESSAGE_KEYS = (
    Declaration(
        "messages.role",
        "string",
        fields.REQUIRED,
        Rule("Who speaks; any word that the template knows.", ("chat-custom-role",)),
    ),
    Declaration(
        "messages.content",
        "string or list of object or null",
        None,
        Rule(
            "What is said. Parts of type text are joined with line breaks; other types are a 400.",
            ("chat-parts-joined", "chat-null-assistant-dropped"),
        ),
    ),
    _lost("name", "string or null", "every role but tool"),
    _lost("tool_calls", "list of object or null", "assistant turns"),
    _lost("function_call", "object or null", "assistant turns"),
    _lost("refusal", "string or null", "assistant turns"),
    _lost("tool_call_id", "string", "tool turns"),
)

ENDPOINTS = (
    Endpoint(
        "POST /v1/chat/completions",
        (ChatRequest,),
        _unknown("extra-chat", "extra-nested-stream-options", "type-two-errors"),
        (*_NEVER_FIELDS, "prompt", "suffix", "allowed_token_ids"),
        _MESSAGE_KEYS,
    ),
    Endpoint(
        "POST /v1/completions",
        (CompletionRequest,),
        _unknown("extra-completion-messages", "extra-completion-tools"),
        (
            *_NEVER_FIELDS,
            "messages",
            "top_logprobs",
            "tools",
            "tool_choice",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "add_generation_prompt",
        ),
    ),
    Endpoint(
        "POST /v1/embeddings",
        (EmbeddingRequest,),
        _unknown("test_unknown_fields_are_refused_everywhere"),
        ("truncate_prompt_tokens", "add_special_tokens"),
    ),
    Endpoint(
        "POST /tokenize",
        (TokenizeCompletionRequest, TokenizeChatRequest),
        _unknown("tok-prompt-agp", "test_unknown_fields_are_refused_everywhere"),
        ("tools", "chat_template", "documents"),
        _MESSAGE_KEYS,
    ),
    Endpoint("POST /detokenize", (DetokenizeRequest,), _unknown("detok-extra")),
)

DECISIONS = (
    "A client's mistake is never a 500 and never a cut connection: a body that is no object, a content type"
    " that is not JSON, a wrong type in a field that is compared early, a negative token id, a malformed"
    " pattern or schema are all 400.",
    "NaN, Infinity, half a surrogate pair and nesting deeper than 200 levels are no JSON.",
    "Null means absent: max_tokens null is 16 in completions, tool_choice null is none, top_logprobs null"
    " is 0 and keeps the logprobs. Where the original's type check refuses null (n in completions, top_k,"
    " min_p, repetition_penalty, encoding_format) it stays refused.",
    "A guided field together with a named tool is a 400 (`You can only either use guided decoding or tools,"
    " not both.`): the original has this check, but it cannot be reached there.",
    "An empty guided_choice is a 400: it allows no answer at all.",
    "Beams differ from each other: where a guide allows fewer answers than n, the request is a 400.",
    "Both names of guided_decoding_backend mean the one guiding engine that there is, so white space and"
    " number formats follow that engine; an unknown name is refused as in the original.",
    "Empty messages are a 400 that says so, whatever the template would make of them.",
    "Token ids above the vocabulary in a prompt are a 400 that names the prompt.",
    "A message, tool or document that spells a control token (`<|im_end|>`) writes its letters: only the"
    " template opens and closes turns. In the original a user's text can. In prompts of completions it is the"
    " token, as there.",
    "Images and audio are a 400: the models served here read text only.",
    "A request has at most 1024 sequences (best_of times the number of prompts); the original has no bound.",
    "Rejected values are echoed up to 16,384 characters of a message, at most 64 errors are listed, and a"
    " crowd (256 fields in one object, 65,536 prompts, 300,000 biases) is refused as such.",
    "usage in a stream's last chunk sums over all choices and prompts; the original reports the last one.",
    "echo works in streams: the first chunk of each choice begins with the prompt.",
    "A finished choice sends its finish chunk once; the original repeats it until its siblings finish.",
    "Tool deltas carry index, id, type and name in the first delta of a call, arguments only after that.",
    "Minus infinity never reaches JSON: logprobs are at least -9999.0.",
    "Embeddings in base64 are float32 as in OpenAI's API (the original packs float64), and created is the"
    " epoch's second.",
    "The API key guards every prefix under which the API can be reached.",
    "Errors the original does not know have types of their own: RateLimitError (429),"
    " ServiceUnavailableError (503), TimeoutError (504), InternalServerError (500). A 500 never says more"
    " than `Internal server error`.",
    "Limits that the original's engine finds (too many logprobs, an empty prompt) come inside the stream,"
    " as there, when a stream was asked for.",
)


def compat() -> dict[str, Any]:
    """Every field of every endpoint with status, rule and proof."""
    return fields.compat(NAME, ENDPOINTS, DECISIONS)
