"""OpenAI's embeddings: the vectors of texts.

Read down: EmbeddingBody, the fields of a request; parse_embeddings, which makes a prompt of each text;
EmbeddingBuilder, which builds the response. The engine's result is the hidden state of a prompt's last
token. This file cuts it (`dimensions`), and normalizes it as the model's files say.

Source: OpenAI's API reference (Create embeddings).
"""

import base64
import secrets
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from engine import Request
from server.api import Choice, CompletionRequest, ServedModel
from server.openai_requests import Prompts
from server.pipe_messages import TextRequest
from server.request_fields import ApiError, Fields
from text.tokenizer import Embedding

MAX_INPUTS = 2048


class EmbeddingBody(Fields):
    model: str = ""
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


@dataclass
class EmbeddingRequest(CompletionRequest):
    """A parsed request to /v1/embeddings. Each text is a choice without new tokens."""

    dimensions: int = 0
    is_base64: bool = False


def parse_embeddings(model: ServedModel, body: dict) -> EmbeddingRequest:
    """Parse a body of /v1/embeddings."""
    fields = EmbeddingBody.read(body)
    model.check_model_name(fields.model)
    embedding = model.tokenizer.embedding
    if embedding is None:
        raise ApiError(
            f"the model {model.name!r} makes no embeddings: its files name no pooling (modules.json of "
            "sentence-transformers, or pooling_type of a GGUF file)",
            param="model",
        )
    most = model.config.dim
    if fields.dimensions is not None and fields.dimensions > most:
        raise ApiError(f"dimensions must be at most {most}, as the model has: {fields.dimensions}", param="dimensions")
    if len(fields.input) > MAX_INPUTS:
        raise ApiError(f"input has {len(fields.input)} texts, at most {MAX_INPUTS} are supported", param="input")

    choices = []
    for text in fields.input:
        ids = input_ids(model, embedding, text)
        request = Request(ids, max_new_tokens=model.check_length(ids, 0, "input", 0), embeds=True)
        text_request = TextRequest(next(model.request_ids), request, can_time_out=not choices)
        choices.append(Choice(len(choices), text_request))
    return EmbeddingRequest(
        f"embd-{secrets.token_hex(12)}",
        choices,
        dimensions=fields.dimensions or most,
        is_base64=fields.encoding_format == "base64",
    )


def input_ids(model: ServedModel, embedding: Embedding, text: str | list[int]) -> list[int]:
    """The prompt for a text, or for token ids, which are taken as they are."""
    if not text:
        raise ApiError("input has an empty text; give at least one token", param="input")
    if isinstance(text, list):
        return text
    ids = model.encode(text, "input")
    appended = list(embedding.append_ids)
    has_end = ids[-len(appended) :] == appended
    return ids if has_end else ids + appended


class EmbeddingBuilder:
    """Builds the response of /v1/embeddings, which is never streamed."""

    def __init__(self, model: ServedModel, completion: EmbeddingRequest):
        self.model = model
        self.completion = completion

    def whole(self) -> dict:
        usage = self.completion.usage()
        vectors = [self.vector(choice.updates[-1].embedding) for choice in self.completion.choices]
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(vectors)],
            "model": self.model.name,
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        }

    def vector(self, data: bytes) -> str | list[float]:
        """A vector as the client wants it. data: the engine's float32 numbers."""
        vector = torch.frombuffer(bytearray(data), dtype=torch.float32)[: self.completion.dimensions]  # (D,)
        if self.model.tokenizer.embedding.normalize:
            vector = F.normalize(vector, dim=0)  # of zeros it makes zeros
        if self.completion.is_base64:
            return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        return vector.tolist()
