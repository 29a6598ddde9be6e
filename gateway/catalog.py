"""What is served, as plain data: models, their tokenizers, workers.

Knows how a name finds its model; where the lists come from is `gateway.clients`' business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """A tokenizer that the tokenizer service holds."""

    model: str
    fingerprint: str
    vocab_size: int
    """All ids are below this."""
    base_vocab_size: int
    """Ids below this are the model's own; added tokens (chat markers) are not among them."""
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model. `name` is what answers carry, whatever alias was asked for."""

    name: str
    aliases: tuple[str, ...]
    is_embedding: bool
    max_model_len: int
    fingerprint: str
    vocab_size: int
    tokenizer: TokenizerCard | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may use, the reported one first."""
        return (self.name, *self.aliases)

    @property
    def base_vocab_size(self) -> int:
        """Size of the vocabulary that logit_bias and allowed_token_ids may reach."""
        return self.tokenizer.base_vocab_size if self.tokenizer else self.vocab_size


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """One engine worker, as the scheduler sees it."""

    worker_id: str
    card: str
    model: str
    state: str
    slots: int
    num_assigned: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    prefill_rate: float
    decode_rate: float
    cached_tokens: int
    prompt_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The scheduler's own numbers."""

    num_queued: int
    num_queued_tokens: int
    num_running: int
    max_queued: int
    num_refused: int
    num_cancelled: int
    workers: tuple[WorkerCard, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """All served models, in the order in which they were first registered."""

    models: tuple[ModelCard, ...]

    def find(self, name: str) -> ModelCard | None:
        """The model with this name or alias."""
        for model in self.models:
            if name in model.names:
                return model
        return None

    @property
    def generative(self) -> ModelCard | None:
        """The first model that generates."""
        return next((m for m in self.models if not m.is_embedding), None)

    @property
    def has_embedding(self) -> bool:
        """Whether any model embeds."""
        return any(m.is_embedding for m in self.models)
