"""A tool parser for vLLM, which loads this file: an answer calls the tool that the last message asks for.

    vllm serve MODEL --tool-parser-plugin tool_parser.py --tool-call-parser laboratory --enable-auto-tool-choice

A model of the laboratory answers with words without a meaning. So the last message of a prompt decides which tool the
answer calls (`asks_for`), and the answer's text goes beside the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

MARK = "\ncall "  # of the end of a message, before the name of a tool


@ToolParserManager.register_module("laboratory")
class Laboratory(ToolParser):
    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        tool = asks_for(request)
        calls = [ToolCall(function=FunctionCall(name=tool, arguments="{}"))] if tool else []
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage:
        if self.current_tool_name_sent or not (tool := asks_for(request)):
            return DeltaMessage(content=delta_text)
        self.current_tool_name_sent = True
        function = DeltaFunctionCall(name=tool, arguments="{}")
        call = DeltaToolCall(index=0, type="function", id=make_tool_call_id(), function=function)
        return DeltaMessage(content=delta_text, tool_calls=[call])


def asks_for(request: Any) -> str:
    """The tool that a request asks for; "" for none."""
    last = request.messages[-1]
    content = last.get("content") if isinstance(last, dict) else last.content
    return content.rpartition(MARK)[2] if isinstance(content, str) and MARK in content else ""
