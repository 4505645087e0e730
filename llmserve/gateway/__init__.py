"""A request of a client on its way in: endpoints, bodies, prompts, calls.

agent_bodies : the bodies of /v1/responses and /v1/messages, which agent programs send
aliases      : other names of models, each with the models that stand behind it
answers      : responses that the front-end itself makes
app          : the HTTP application
bodies       : the JSON bodies of clients
endpoints    : the endpoints that are passed to engines
fitting      : refuses requests that no engine can ever serve, by what is certain before they run
keep_alive   : what a stream says before the engine does
parse        : parses a client's JSON into a Call
paths        : which paths there are
prompts      : what is read of a prompt, in each form in which clients send it
responses    : responses that engines keep
"""
