"""Tokenizers without transformers: a content-hashed bundle of files, chat templates, streaming text."""

from .bundle import BUNDLE_FILES
from .detokenizer import IncrementalDetokenizer
from .rendered import RenderedChat
from .tokenizer import Tokenizer

__all__ = ["BUNDLE_FILES", "IncrementalDetokenizer", "RenderedChat", "Tokenizer"]
