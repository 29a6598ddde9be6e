"""What a validated request asks the engine for: every default resolved, nothing of any dialect left.

A different type from the parsed request on purpose: holding a `GenerationSpec` means the rules were checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What the text must look like. `value`: schema text, regex, Lark grammar; choices in `choices`."""

    kind: Literal["json_schema", "regex", "grammar", "choice", "json_object"]
    value: str = ""
    choices: tuple[str, ...] = ()
    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One prompt's generation parameters; the names are those of `candor.v1` messages."""

    n: int = 1
    best_of: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    hold_back_longest_stop: bool = False
    """Stream text late by the longest stop string instead of only while it can begin one."""
    logprobs: int | None = None
    """Alternatives per generated token; None: no logprobs."""
    prompt_logprobs: int | None = None
    raw_logprobs: bool = False
    """Report the model's own distribution instead of the one sampled from."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    constraint: ConstraintSpec | None = None
