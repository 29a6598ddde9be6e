"""A worker that embeds: its door and its process. See `engine.backends.embedding` for the work itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import grpc

from candor import errors
from candor.v1 import engine_pb2, engine_pb2_grpc, inference_pb2
from engine.backends.embedding import EmbeddingBackend, Encoder
from engine.config import Config
from engine.process import WorkerProcess
from engine.service import Served, check_request
from tokenizer_svc.codec import Codec

MAX_INPUTS = 65_536
"""Most inputs of one request; the gateway's own bound on prompts."""


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
        if len(wanted.inputs) > MAX_INPUTS:
            raise errors.InvalidArgument(
                f"{len(wanted.inputs)} inputs, at most {MAX_INPUTS}", field="inputs"
            )
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
        config = self._config
        self.backend = EmbeddingBackend(
            self._encoder, slots=config.slots, max_requests=config.max_requests
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
