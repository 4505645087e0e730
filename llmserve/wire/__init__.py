"""What clients and engines write: JSON, headers, forms, event streams, answers and errors. Pure.

answer_forms  : the forms of engines' answers
error_objects : what an engine's error says, in any of the forms that engines use, and what follows from it
event_stream  : reads an answer's token counts, and whether the answer hit a limit, from its bytes without re-encoding
form_data     : where the fields of a multipart/form-data body are
headers       : HTTP headers of llmserve
json_text     : JSON as others send it
lenient_json  : reads JSON of engines
raw_views     : where the value of a field lies in a body, so that it can be exchanged without writing the body again
terms         : the terms of a call between a gateway and the servers behind it, in one header
tool_calls    : the calls of tools in an answer
typed_events  : reads streams whose events have a type
"""
