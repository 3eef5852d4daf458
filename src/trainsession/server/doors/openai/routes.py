"""The OpenAI door: `docs/openai.md`, route by route. It translates and decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from ....errors import InvalidRequest
from ...auth import CallerOf, authenticated, needs
from ...routes import KeyedRoute, PlainRoute
from ..native import ServiceOf
from .answers import Answer, ChatCompletion, Completion, Model, ModelList, OpenAIError
from .chat import calls_tools, prompt_of
from .chat_answers import ChatAnswer, sample_of
from .completions import TextAnswer, prompts_of, samples_of
from .drawing import Drawing, EventStream, started
from .models import SESSION_HEADER, Tokenizers, found, listed, served
from .requests import ChatRequest, CompletionRequest, SampleFields, parse

PREFIX = "/openai/v1"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIError, "description": "An error in OpenAI's shape."} for status in ("4XX", "5XX")
}

hot = APIRouter(
    prefix=PREFIX, tags=["openai"], dependencies=[Depends(authenticated)], responses=_ERRORS, route_class=PlainRoute
)
"""Their bodies are read only after the key was checked."""
router = APIRouter(
    prefix=PREFIX, tags=["openai"], dependencies=[Depends(authenticated)], responses=_ERRORS, route_class=KeyedRoute
)


def _reads(body: type[SampleFields]) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


def _answers(body: type[Answer]) -> dict[int | str, dict[str, Any]]:
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": body, "content": events, "description": "The whole answer, or its chunks as events."}}


@hot.post("/chat/completions", responses=_answers(ChatCompletion), openapi_extra=_reads(ChatRequest))
@needs("sample")
async def chat_completions(request: Request, caller: CallerOf, service: ServiceOf) -> Response:
    """An answer to a chat, through the model's own chat template."""
    asked = parse(ChatRequest, await request.body())
    model = await served(service, caller, asked.model, request.headers.get(SESSION_HEADER))
    tokenizer = await _tokenizers(request).of(model.base_model)
    prompt = await asyncio.to_thread(prompt_of, tokenizer, asked)
    sample = sample_of(asked, prompt, model.payer)
    with _prompt_is_called("messages"):
        drawing = await Drawing.submit(service, caller, model.weights, [sample])
        answer = ChatAnswer(drawing.ids[0], tokenizer, asked, reads_tools=calls_tools(tokenizer, asked))
        if asked.stream:
            return EventStream(request, drawing, answer.chunks(await started(request, drawing)))
        (response,) = await drawing.results(request)
    return Response(answer.whole(response).to_json(), media_type="application/json")


@hot.post("/completions", responses=_answers(Completion), openapi_extra=_reads(CompletionRequest))
@needs("sample")
async def completions(request: Request, caller: CallerOf, service: ServiceOf) -> Response:
    """What follows a text, or each of several."""
    asked = parse(CompletionRequest, await request.body())
    model = await served(service, caller, asked.model, request.headers.get(SESSION_HEADER))
    tokenizer = await _tokenizers(request).of(model.base_model)
    prompts = await asyncio.to_thread(prompts_of, tokenizer, asked)
    drawing = await Drawing.submit(service, caller, model.weights, samples_of(asked, prompts, model.payer))
    answer = TextAnswer(drawing.ids[0], tokenizer, asked, prompts)
    if asked.stream:
        return EventStream(request, drawing, answer.chunks(await started(request, drawing)))
    responses = await drawing.results(request)
    return Response(answer.whole(responses).to_json(), media_type="application/json")


@router.get("/models", response_model=ModelList)
@needs("info")
async def list_models(caller: CallerOf, service: ServiceOf) -> Any:
    return await listed(service, caller)


@router.get("/models/{name:path}", response_model=Model)
@needs("info")
async def get_model(name: str, caller: CallerOf, service: ServiceOf) -> Any:
    return await found(service, caller, name)


@contextmanager
def _prompt_is_called(field: str) -> Iterator[None]:
    """Errors of the service that are about the prompt name the field that the caller wrote."""
    try:
        yield
    except InvalidRequest as error:
        if error.details.get("key") != "prompt":
            raise
        raise type(error)(error.message, details={**error.details, "key": field}) from None


def _tokenizers(request: Request) -> Tokenizers:
    return cast(Tokenizers, request.app.state.tokenizers)
