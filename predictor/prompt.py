"""What a length predictor may know of a request before it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the predictor sees it.

    text                what the answer answers: the last user turn, or the whole prompt of a plain completion
    model               the name of the model that is asked; "" when unknown
    system              the system prompt
    history_characters  characters of all other turns of the conversation
    stop                stop strings, which set a request's answers apart from others of its kind
    """

    text: str
    model: str = ""
    system: str = ""
    history_characters: int = 0
    stop: tuple[str, ...] = ()
