"""The OpenAI door, for evals, agents and chat with the ``openai`` client as it is."""

from .errors import error_response
from .models import Tokenizers
from .requests import ChatRequest, CompletionRequest
from .routes import PREFIX, hot, router

__all__ = ["PREFIX", "ChatRequest", "CompletionRequest", "Tokenizers", "error_response", "hot", "router"]
