"""The unary calls of InferenceService."""

from collections.abc import Mapping
from typing import Any, Unpack

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet.inference.v1 import model_pb2
from lorikeet_client import generation_messages as messages
from lorikeet_client.calls import Call, Service
from lorikeet_client.generation import Chat, Completion, GenerateOptions, Tokenized
from lorikeet_client.model import Model


def complete(prompt: str | None, **options: Unpack[GenerateOptions]) -> Call[pb.CompleteResponse, Completion]:
    """Generate in one reply. No time limit but the caller's: how long it takes is up to the request."""
    request = pb.CompleteRequest(request=messages.generate_request(prompt, **options))
    return Call(
        Service.INFERENCE, "Complete", request, pb.CompleteResponse, messages.completion, timeout_s=None
    )


def abort(request_id: str) -> Call[pb.AbortResponse, bool]:
    """Stop a running request."""
    request = pb.AbortRequest(request_id=request_id)
    return Call(Service.INFERENCE, "Abort", request, pb.AbortResponse, lambda reply: reply.aborted)


def tokenize(
    prompt: str | None,
    chat: Chat | None,
    add_special_tokens: bool | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> Call[pb.TokenizeResponse, Tokenized]:
    """A prompt as the model reads it."""
    request = messages.tokenize_request(
        prompt, chat, add_special_tokens=add_special_tokens, template_arguments=template_arguments
    )
    return Call(Service.INFERENCE, "Tokenize", request, pb.TokenizeResponse, messages.tokenized)


def get_model() -> Call[model_pb2.GetModelResponse, Model]:
    """What the node serves."""
    request = model_pb2.GetModelRequest()
    return Call(Service.INFERENCE, "GetModel", request, model_pb2.GetModelResponse, messages.model)
