"""From token ids to text as it may be sent: whole characters only, and nothing of a stop string."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of an unfinished character

# A character is at most four bytes long. Text that still ends in the middle of one after this many tokens
# is not going to become valid, and waiting on would cost time that grows with its length.
_UNFINISHED_TOKENS_MAX = 16

# Tokens before the first new one that are decoded with it: tokenizers of the SentencePiece family drop the
# space in front of whatever comes first.
_CONTEXT_TOKENS = 6


class TextStream:
    """The text of one answer, token by token.

    The pieces that `push` and `flush` return join to the answer: they hold whole characters, and neither a
    stop string nor what may turn out to be the beginning of one. `stopped` tells that a stop string came.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = stop
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        # A window of tokens slides over the answer. Its first `_settled` tokens have been sent and are only
        # there because a token's text may depend on the tokens before it.
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._settled = len(self._window)
        self._sent_chars = len(decode(self._window)) if self._window else 0  # of the window's text

    def push(self, token_id: int) -> str:
        """Takes the next token, returns the text that can be sent now."""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._settled
        if text.endswith(_REPLACEMENT) and pending < _UNFINISHED_TOKENS_MAX:
            whole = text.rstrip(_REPLACEMENT)
            piece = whole[self._sent_chars :]
            self._sent_chars = max(self._sent_chars, len(whole))
            return self._release(piece)
        piece = text[self._sent_chars :]
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._sent_chars = len(self._decode(self._window))
        return self._release(piece)

    def flush(self) -> str:
        """The rest, when no further token will come."""
        piece = self._decode(self._window)[self._sent_chars :] if self._window else ""
        self._sent_chars += len(piece)
        text = self._release(piece) + self._held
        self._held = ""
        return text

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        self._held += piece
        if not self._stop:
            text, self._held = self._held, ""
            return text
        cuts = [cut for stop in self._stop if (cut := self._held.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            text, self._held = self._held[: min(cuts)], ""
            return text
        border = len(self._held) - max(_overlap(self._held, stop) for stop in self._stop)
        text, self._held = self._held[:border], self._held[border:]
        return text


class WholeText:
    """The text of an answer that nobody reads before its end, without stop strings: decoded once."""

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
