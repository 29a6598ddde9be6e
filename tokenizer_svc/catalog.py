"""The models whose tokenizers are loaded, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from candor.errors import InvalidArgument, NotFound
from tokenizer_svc.chat_template import NO_TEMPLATE, ChatTemplate, TemplateLimits
from tokenizer_svc.codec import Codec, open_codec
from tokenizer_svc.markers import Markers

log = logging.getLogger("tokenizer_svc")


@dataclass(frozen=True)
class LoadedModel:
    """A tokenizer and the template that goes with it."""

    name: str
    codec: Codec
    markers: Markers
    own_template: ChatTemplate | InvalidArgument
    """The compiled template, or why there is none: said to whoever asks for a chat."""

    def template(self) -> ChatTemplate:
        """The model's own template. Raises InvalidArgument when it has none that works."""
        if isinstance(self.own_template, InvalidArgument):
            raise self.own_template
        return self.own_template


class Catalog:
    """Loaded models; names that share a path share the tokenizer."""

    def __init__(self, paths: Mapping[str, Path], limits: TemplateLimits) -> None:
        """Load all. Raises ValueError, naming the model, for one that cannot be loaded."""
        self._models: dict[str, LoadedModel] = {}
        codecs: dict[Path, Codec] = {}
        markers: dict[Path, Markers] = {}
        for name, path in paths.items():
            try:
                codec = codecs[path] = codecs.get(path) or open_codec(path)
            except ValueError as error:
                raise ValueError(f"model {name!r}: {error}") from error
            markers[path] = markers.get(path) or Markers(codec)
            template = _own_template(name, codec, limits)
            self._models[name] = LoadedModel(name, codec, markers[path], template)

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(self._models.values())

    def get(self, name: str) -> LoadedModel:
        """The named model. Raises NotFound."""
        try:
            return self._models[name]
        except KeyError:
            raise NotFound(
                f"The model `{name}` does not exist.", reason="MODEL_NOT_FOUND", field="model"
            ) from None


def _own_template(
    name: str, codec: Codec, limits: TemplateLimits
) -> ChatTemplate | InvalidArgument:
    if codec.chat_template is None:
        return InvalidArgument(NO_TEMPLATE, reason="NO_TEMPLATE", field="chat_template")
    try:
        return ChatTemplate(codec.chat_template, codec.special_tokens, limits)
    except InvalidArgument as error:
        # The model can still be served: completions need no template, and requests may bring their own.
        log.warning("the chat template is unusable", extra={"model": name, "why": error.message})
        return error
