"""What is served, kept fresh: the list of models of the scheduler joined to the tokenizers.

Knows how old an answer may be and who has to wait for a newer one; what the list means is `gateway.catalog`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from gateway.catalog import Catalog, ModelCard, TokenizerCard
from gateway.clients import SchedulerClient, TokenizerClient

log = logging.getLogger("gateway.directory")

LONGEST_STALE_S = 30.0
"""How old a list of models may be used while a newer one cannot be had."""


class Directory:
    """The catalog, asked for again when it is older than its time to live.

    Callers are not made to wait for a refresh while the list they have is at most `LONGEST_STALE_S` old,
    except when they look for a name that is not in it.
    """

    def __init__(
        self, scheduler: SchedulerClient, tokenizer: TokenizerClient, *, ttl_s: float
    ) -> None:
        self._scheduler, self._tokenizer, self._ttl_s = scheduler, tokenizer, ttl_s
        self._catalog = Catalog(())
        self._tokenizers: dict[str, TokenizerCard] = {}
        self._asked_at = -float("inf")
        self._refreshing: asyncio.Task[Catalog] | None = None

    async def close(self) -> None:
        """Stop a refresh that is under way."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def find(self, name: str) -> ModelCard | None:
        """The model of this name. Raises Unavailable when nobody can say."""
        model = (await self.get()).find(name)
        if model is None and time.monotonic() - self._asked_at > self._ttl_s:
            model = (await self._refresh()).find(name)
        return model

    async def get(self) -> Catalog:
        """Everything served. Raises Unavailable when the scheduler or the tokenizer is out of reach."""
        age_s = time.monotonic() - self._asked_at
        if age_s <= self._ttl_s:
            return self._catalog
        if age_s > LONGEST_STALE_S or not self._catalog.models:
            return await self._refresh()
        self._start_refresh()
        return self._catalog

    async def _refresh(self) -> Catalog:
        return await asyncio.shield(self._start_refresh())

    def _start_refresh(self) -> asyncio.Task[Catalog]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._ask(), name="list of models")
            self._refreshing.add_done_callback(_note_failure)
        return self._refreshing

    async def _ask(self) -> Catalog:
        models = await self._scheduler.list_models()
        wanted = {m.fingerprint for m in models}
        if not wanted <= self._tokenizers.keys():
            self._tokenizers = {t.fingerprint: t for t in await self._tokenizer.describe()}
        cards = (replace(m, tokenizer=self._tokenizers.get(m.fingerprint)) for m in models)
        self._catalog, self._asked_at = Catalog(tuple(cards)), time.monotonic()
        return self._catalog


def _note_failure(task: asyncio.Task[Catalog]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("the list of models could not be refreshed: %s", error)
