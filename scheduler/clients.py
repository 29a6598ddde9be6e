"""The calls this service makes to the tokenizer service."""

from __future__ import annotations

import grpc

from candor import errors, rpc
from candor.v1 import inference_pb2, tokenizer_pb2, tokenizer_pb2_grpc


class TokenizerClient:
    """Turns text and chat prompts into token ids."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._channel = rpc.connect(address)
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def encode(self, model: str, prompt: inference_pb2.Prompt) -> tuple[list[int], str]:
        """Token ids and the tokenizer's fingerprint."""
        try:
            if prompt.HasField("chat"):
                chat = tokenizer_pb2.EncodeChatRequest(model=model, conversations=[prompt.chat])
                if prompt.HasField("add_special_tokens"):
                    chat.add_special_tokens = prompt.add_special_tokens
                rendered = await self._stub.EncodeChat(
                    chat, timeout=self._timeout_s, metadata=rpc.call_metadata()
                )
                return list(rendered.sequences[0].ids), rendered.fingerprint
            text = tokenizer_pb2.EncodeRequest(model=model, texts=[prompt.text])
            if prompt.HasField("add_special_tokens"):
                text.add_special_tokens = prompt.add_special_tokens
            encoded = await self._stub.Encode(
                text, timeout=self._timeout_s, metadata=rpc.call_metadata()
            )
            return list(encoded.sequences[0].ids), encoded.fingerprint
        except grpc.aio.AioRpcError as error:
            # What the transport has to say names addresses; that stays here.
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise errors.Unavailable(
                    "the tokenizer service does not answer", reason="TOKENIZER_UNAVAILABLE"
                ) from error
            raise rpc.from_rpc_error(error) from error

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
