"""Strategies for chats."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

WORDS = [
    "the",
    " ",
    "\n",
    "\n\n",
    "a",
    "2",
    "é",
    "e\u0301",
    "👋",
    "<b>",
    "assistant",
    "<|im_",
    "'",
    '"',
    "\\",
    "{}",
    "\t",
]
SPECIAL = ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"]

plain_text = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
any_text = st.lists(st.sampled_from(WORDS + SPECIAL), max_size=6).map("".join)
word = st.sampled_from(["the", "a", "2", "é", "<b>"])


@st.composite
def chats(
    draw: st.DrawFn, text: st.SearchStrategy[str] = any_text, *, begins: bool = True, thinking: bool = True
) -> list[dict[str, Any]]:
    """A chat that ends with the assistant's reply; ``begins``: each reply begins with a word, not with space."""
    chat: list[dict[str, Any]] = []
    if draw(st.booleans()):
        chat.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(text)})
        reply = {"role": "assistant", "content": (draw(word) if begins else "") + draw(text)}
        if thinking and draw(st.booleans()):
            reply["reasoning_content"] = draw(word)
        chat.append(reply)
    return chat
