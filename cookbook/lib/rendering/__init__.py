"""Chats as tokens, and back: the model's own template, exact loss masks, stop tokens, parsed replies.

    renderer = Renderer(trainer.get_tokenizer())
    renderer.prompt(messages)                     what a sampler is given
    renderer.render(messages, learn="all")        the chat as `apply_chat_template` has it, with a loss mask
    renderer.examples(messages)                   what to train on: each reply behind the prompt that a sampler sees
    renderer.parse(sample.tokens)                 thinking, text, tool calls, and what is none of them
    print(renderer.render(messages))              the mask, drawn (also in notebooks, and `save_mask` for a PNG)

Nothing here is known about a family of models: headers, ends of turns, stop tokens, and the tags of thinking and of
tool calls are what the tokenizer's own template prints for texts that this module chose.
"""

from .drawing import save_mask
from .masks import Rendered
from .parsing import Reply, Unparsed
from .renderer import Learn, Renderer

__all__ = ["Learn", "Rendered", "Renderer", "Reply", "Unparsed", "save_mask"]
