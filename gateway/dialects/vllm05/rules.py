"""The fields that chat and completions share: type and rule once, for both bodies."""

from __future__ import annotations

from typing import Annotated, Any

from gateway.dialects.fields import Rule
from gateway.dialects.vllm05.shapes import (
    AtLeastOne,
    Biases,
    IdList,
    ResponseFormat,
    Seed,
    StreamOptions,
    TextList,
)

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
    Biases | None,
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
SeedField = Annotated[
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
StreamOptionsField = Annotated[
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
        ("test_changing_a_field_changes_the_outcome",),
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
ResponseFormatField = Annotated[
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
