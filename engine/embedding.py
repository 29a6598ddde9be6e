"""A worker that embeds: its door and its process. See `engine.backends.embedding` for the work itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from candor import errors, rpc
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2
from engine.backends.embedding import EmbeddingBackend, Encoder
from engine.config import Config
from engine.core.passes import TextLimits
from engine.process import WorkerProcess
from engine.runners import blas
from engine.runners.bert import BertEncoder
from engine.service import Served, check_request
from tokenizer_svc.codec import Codec

_VECTOR_OVERHEAD_BYTES = 16
"""What a vector takes in a message besides its numbers."""


def open_encoder(config: Config, codec: Codec) -> BertEncoder:
    """Load the encoder. Raises ValueError when it does not fit to a setting or to the tokenizer."""
    if config.runner != "auto":
        raise ValueError(
            f"--runner={config.runner} generates text, {config.model_path} is an encoder: leave it at auto"
        )
    if config.engine_metrics is not None:
        raise ValueError(
            f"--engine-metrics={config.engine_metrics}: a worker that embeds has no such endpoint"
        )
    encoder = BertEncoder(Path(config.model_path))
    if (config.max_model_len or 0) > encoder.max_model_len:
        raise ValueError(
            f"--max-model-len={config.max_model_len} is above the {encoder.max_model_len} tokens of "
            f"{config.model_path}"
        )
    if codec.vocab_size > encoder.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.model_path} has {codec.vocab_size} tokens, the encoder "
            f"{encoder.vocab_size}"
        )
    blas.set_threads(1)  # of a pass; the backend computes several at a time
    return encoder


class EmbeddingService(engine_pb2_grpc.EngineServiceServicer):
    """The door of an embedding worker."""

    def __init__(
        self,
        backend: EmbeddingBackend,
        served: Served,
        *,
        info: Callable[[], engine_pb2.WorkerInfo],
        report: Callable[[], engine_pb2.Report],
        is_draining: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._served = served
        self._info = info
        self._report = report
        self._is_draining = is_draining

    async def Embed(
        self,
        request: engine_pb2.EngineServiceEmbedRequest,
        context: grpc.aio.ServicerContext[
            engine_pb2.EngineServiceEmbedRequest, engine_pb2.EngineServiceEmbedResponse
        ],
    ) -> engine_pb2.EngineServiceEmbedResponse:
        """One vector per input, in order. Cancelled with its call, between two passes."""
        wanted = request.request
        check_request(wanted, self._served, self._is_draining())
        sequences = [list(tokens.ids) for tokens in wanted.inputs]
        vectors = await self._backend.embed(sequences)
        return engine_pb2.EngineServiceEmbedResponse(
            response=inference_pb2.EmbedResponse(
                embeddings=[inference_pb2.Embedding(values=row) for row in vectors.tolist()],
                prompt_tokens=sum(map(len, sequences)),
            )
        )

    async def Run(
        self,
        request_iterator: AsyncIterator[engine_pb2.RunRequest],
        context: grpc.aio.ServicerContext[engine_pb2.RunRequest, engine_pb2.RunResponse],
    ) -> AsyncIterator[engine_pb2.RunResponse]:
        """Not this kind of worker."""
        nothing: tuple[engine_pb2.RunResponse, ...] = ()
        for response in nothing:  # the call is a stream, though nothing ever comes in it
            yield response
        raise errors.Unimplemented(
            f"{self._served.names[0]} embeds and does not generate", field="model"
        )

    async def GetInfo(
        self,
        request: engine_pb2.GetInfoRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetInfoRequest, engine_pb2.GetInfoResponse],
    ) -> engine_pb2.GetInfoResponse:
        """Who this is and how it is doing."""
        return engine_pb2.GetInfoResponse(info=self._info(), report=self._report())


class EmbeddingProcess(WorkerProcess):
    """A worker process around an encoder."""

    def __init__(self, config: Config, encoder: Encoder, codec: Codec) -> None:
        """Called on the event loop."""
        self._encoder = encoder
        super().__init__(config, codec)

    def _open_backend(self) -> EmbeddingBackend:
        config, encoder = self._config, self._encoder
        # A request whose answer would be too large to send is not begun.
        vector_bytes = 4 * encoder.embedding_size + _VECTOR_OVERHEAD_BYTES
        self.backend = EmbeddingBackend(
            encoder,
            slots=config.slots,
            token_budget=config.token_budget,
            threads=config.num_threads,
            limits=TextLimits(
                max_inputs=min(config.max_embed_inputs, rpc.MAX_MESSAGE_BYTES // vector_bytes),
                max_input_tokens=config.max_model_len or encoder.max_model_len,
                vocab_size=encoder.vocab_size,
            ),
            max_requests=config.max_requests,
            max_tokens=config.max_embed_tokens,
            on_death=self._die,
        )
        return self.backend

    def _service(self) -> EmbeddingService:
        config = self._config
        return EmbeddingService(
            self.backend,
            Served((config.name, *config.served_aliases), self._codec.fingerprint),
            info=lambda: self._info,
            report=lambda: self._report(self.membership.state),
            is_draining=lambda: self.membership.is_draining,
        )

    def _model(self) -> inference_pb2.ModelInfo:
        return inference_pb2.ModelInfo(
            kind=inference_pb2.MODEL_KIND_EMBEDDING, embedding_size=self._encoder.embedding_size
        )

    def _features(self) -> tuple[engine_pb2.EngineFeature, ...]:
        return ()

    def _release(self) -> None:
        pass
