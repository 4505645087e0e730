"""Decoding of token ids into text for the client: whole characters only, and no part of a stop string."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for an unfinished character

# A character is at most four bytes long. Text that still ends inside a character after this many tokens will not
# become valid. Waiting longer would cost time that grows with the length of the text.
_UNFINISHED_TOKENS_MAX = 16

# Number of earlier tokens that are decoded together with a new token. Tokenizers of the SentencePiece family drop
# the space before the first token.
_CONTEXT_TOKENS = 6


class TextStream:
    """The text of one answer, token by token.

    The answer is the concatenation of the results of `push` and `flush`. A result holds whole characters, and
    neither a stop string nor a possible beginning of a stop string. `stopped`: a stop string has occurred.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = stop
        self._unsent = ""  # decoded, but perhaps the beginning of a stop string
        # A window of tokens slides over the answer. The first `_settled` tokens of the window have been sent. They
        # stay in the window because the text of a token may depend on earlier tokens.
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._settled = len(self._window)
        self._sent_chars = len(decode(self._window)) if self._window else 0  # of the window's text

    def push(self, token_id: int) -> str:
        """Append the next token. Returns the text that can be sent now."""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._settled
        if text.endswith(_REPLACEMENT) and pending < _UNFINISHED_TOKENS_MAX:
            whole = text.rstrip(_REPLACEMENT)
            piece = whole[self._sent_chars :]
            self._sent_chars = max(self._sent_chars, len(whole))
            return self._sendable(piece)
        piece = text[self._sent_chars :]
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._sent_chars = len(self._decode(self._window))
        return self._sendable(piece)

    def flush(self) -> str:
        """Return the remaining text after the last token."""
        piece = self._decode(self._window)[self._sent_chars :] if self._window else ""
        self._sent_chars += len(piece)
        text = self._sendable(piece) + self._unsent
        self._unsent = ""
        return text

    def _sendable(self, piece: str) -> str:
        if self.stopped:
            return ""
        self._unsent += piece
        if not self._stop:
            text, self._unsent = self._unsent, ""
            return text
        cuts = [cut for stop in self._stop if (cut := self._unsent.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            text, self._unsent = self._unsent[: min(cuts)], ""
            return text
        border = len(self._unsent) - max(_overlap(self._unsent, stop) for stop in self._stop)
        text, self._unsent = self._unsent[:border], self._unsent[border:]
        return text


class WholeText:
    """The text of an answer without a stream and without stop strings, decoded once at the end."""

    stopped = False

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes the next token; there is no text yet."""
        self._ids.append(token_id)
        return ""

    def flush(self) -> str:
        """The text of all tokens."""
        before = len(self._decode(self._context)) if self._context else 0
        return self._decode([*self._context, *self._ids])[before:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
