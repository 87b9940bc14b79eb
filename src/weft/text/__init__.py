"""Text in and out: tokenizer, chat templates, incremental detokenizing, stop strings.

Uses `tokenizers` and `jinja2`; imports neither torch nor transformers.
"""

from weft.text.chat_template import ChatTemplate
from weft.text.detokenizer import IncrementalDetokenizer
from weft.text.stop import StopMatcher, StopUpdate
from weft.text.stream import TextPiece, TextStream
from weft.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "StopUpdate",
    "TextPiece",
    "TextStream",
    "Tokenizer",
]
