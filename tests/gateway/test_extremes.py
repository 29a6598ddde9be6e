"""Every number a client may send, however large, is refused by name or fits what goes to the services."""

from __future__ import annotations

from typing import Any

import pytest

from candor.v1 import inference_pb2 as pb
from gateway import translate
from gateway.dialects import Chat, Text
from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.reference import ENDPOINTS
from tests.fakes.vllm05 import CHAT, COMPLETION, changed, resolve

NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**31) - 1, -(2**63)]
NUMBERS += [10**40, -(10**40)]
FRACTIONS = [5e-324, 1e-46, 1e39, 1.7e308, -1e39, -1.7e308]
LISTS = {"stop_token_ids", "allowed_token_ids", "prompt"}
TOGETHER: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "length_penalty": {"use_beam_search": True, "best_of": 2, "temperature": 0},
    "min_tokens": {"max_tokens": 20},
}
CASES = [
    (endpoint.path, declaration.name)
    for endpoint in ENDPOINTS
    for declaration in endpoint.declarations()
    if endpoint.path in (CHAT, COMPLETION)
    and ("integer" in declaration.type or "number" in declaration.type)
]


@pytest.mark.parametrize(("endpoint", "name"), CASES, ids=lambda part: str(part).rpartition("/")[2])
def test_a_number_is_refused_or_fits(endpoint: str, name: str) -> None:
    served = 0
    for number in NUMBERS + FRACTIONS:
        value: Any = [number] if name in LISTS else number
        if name == "logit_bias":
            value = {"5": number}
        try:
            resolved = resolve(
                endpoint, changed(endpoint, **TOGETHER.get(name, {}), **{name: value})
            )
        except DialectError as error:
            assert error.status == 400 and error.field, error
            continue
        served += 1
        for prompt, spec in zip(resolved.prompts, resolved.specs, strict=True):
            request = translate.generate_to_pb(
                spec, (1, 2), model="m", request_id="r", fingerprint="", deadline_unix_ms=1
            )
            assert pb.GenerateRequest.FromString(request.SerializeToString()) == request
            if isinstance(prompt, Chat | Text):
                assert prompt.truncate_to is None or 0 < prompt.truncate_to < 2**32
    assert served
