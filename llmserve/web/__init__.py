"""All that clients reach on a port, and the server's own API: Starlette answers every path but those of engines.

admin     : endpoints for operators
app       : all that clients ask on one port
browsers  : what web pages may do on a server without keys
cors      : cross-origin requests
documents : the document of the API, for programs and for people
models    : the models that the engines serve
page      : the page for people
part      : what clients reach: the page, the server's own paths, and the front that answers all requests
paths     : which paths there are
responses : responses that engines keep
site      : the server's own API
state     : the state of the server
"""
