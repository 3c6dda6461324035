"""What stands around a document and a question, so that a model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chat templates trim what they are given, so the mark has no white space around it.
_MARK = "\u2063kvgraft\u2063"


@dataclass(frozen=True)
class Prompt:
    """The document opens the first user turn, the question closes it; without a chat template both are plain text.

    Attributes
    ----------
    opening
        Before a document.
    ending
        After a question.
    chat
        Whether the model's chat template was used, which holds the special tokens itself.
    """

    tokenizer: PreTrainedTokenizerBase
    opening: str
    ending: str
    chat: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """The prompt of a tokenizer's chat template, or a plain one."""
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", "\nAnswer:", False)
        turn = [{"role": "user", "content": _MARK}]
        rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        opening, _, ending = rendered.partition(_MARK)
        return cls(tokenizer, opening, ending, True)

    def document(self, text: str) -> list[int]:
        """Token ids of an artifact: its text, and what opens it."""
        return self._ids(self.opening + text, begins=True)

    def more(self, text: str) -> list[int]:
        """Token ids of what goes on with a document."""
        return self._ids(text, begins=False)

    def after_document(self, question: str) -> list[int]:
        """Token ids of a question that follows a document."""
        return self._ids(f"\n\n{self._asked(question)}{self.ending}", begins=False)

    def alone(self, question: str) -> list[int]:
        """Token ids of a question without a document."""
        return self._ids(f"{self.opening}{self._asked(question)}{self.ending}", begins=True)

    def answer(self, generated: str) -> str:
        """What of generated text answers: a model without a chat template goes on to questions of its own."""
        return (generated if self.chat else generated.partition("\nQuestion:")[0]).strip()

    def _asked(self, question: str) -> str:
        return question if self.chat else f"Question: {question}"

    def _ids(self, text: str, *, begins: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=begins and not self.chat))
