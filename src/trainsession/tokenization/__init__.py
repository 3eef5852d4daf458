"""Tokenizers without transformers: a content-hashed bundle of files, chat templates, streaming text."""

from .detokenizer import IncrementalDetokenizer
from .tokenizer import BUNDLE_FILES, Tokenizer

__all__ = ["BUNDLE_FILES", "IncrementalDetokenizer", "Tokenizer"]
