"""The input of a length predictor: facts about a request before it runs."""

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """A request as the predictor sees it.

    text                the last user turn, or the whole prompt of a plain completion
    model               the name of the requested model; "" when unknown
    system              the system prompt
    history_characters  characters of all other turns of the conversation; an image counts as a text of as many tokens
    stop                stop strings, which distinguish the answers from those of similar requests
    tools               number of tools that the model may call
    format              kind of the structured output, such as "json_schema"; "" for plain text
    output_tokens_max   the request's max_tokens
    sender              name of the client's API key; "" when unknown: who teaches the length
    shaping             further settings that shape the answer, such as "effort high" or "tool_choice required"
    """

    text: str
    model: str = ""
    system: str = ""
    history_characters: int = 0
    stop: tuple[str, ...] = ()
    tools: int = 0
    format: str = ""
    output_tokens_max: int | None = None
    sender: str = ""
    shaping: tuple[str, ...] = ()
