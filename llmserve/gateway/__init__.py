"""A request of a client on its way in: endpoints, bodies, prompts, calls.

agent_bodies   : the bodies of /v1/responses and /v1/messages, which agent programs send
aliases        : other names of models, each with the models that stand behind it
api_document   : parts of the document of the server's API that are not of one route alone
answers        : responses that the front-end itself makes
bodies         : the JSON bodies of clients
completions    : requests that engines answer
content_coding : bodies that clients have packed
draft          : a call while the stages of its admission decide about it
endpoints      : the endpoints that are passed to engines
fitting        : refuses requests that no engine can ever serve, by what is certain before they run
forecasting    : what a call would take, asked by its body
intake         : the way of a request through the stages of its admission
keep_alive     : what a stream says before the engine does
own_routes     : paths of the server's own API: who may use each, what answers, what the document of the API says
parse          : reads a client's request into a draft
part           : where the server listens, and how requests for engines are admitted
prompts        : what is read of a prompt, in each form in which clients send it
stages         : the life of a call until it is queued, as a list of stages that may each refuse
"""
