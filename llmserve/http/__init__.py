"""HTTP/1.1: a server and a client, which know nothing of what is served.

accepting  : the listening socket, and how connections are accepted or refused
asgi       : answers requests by an ASGI application
buffers    : bytes that clients keep in the server's memory
client     : a client for one server
connecting : new connections to one server, and what goes wrong with them
connection : one client's connection, as a machine without I/O
errors     : why a server does not serve a request
exchange   : one request and its answer, the handler that answers, and what connections share
heads      : what the head of a request says
limits     : what a server allows its clients
outflow    : bytes to one client, and whether the client takes them
protocol   : drives connections on asyncio
proxies    : who a client is behind a proxy
reader     : bytes of one client become requests
server     : serves a handler on a socket
tls        : TLS of a server and of clients, from files
"""
