"""HTTP/1.1: the server and the client.

asgi           : answers complete requests by an ASGI application
client         : a small HTTP/1.1 client for one server
connecting     : new connections to one server, and what goes wrong with them
connection     : one client's connection
content_coding : bodies that clients have packed
exchange       : one request of a client, and its answer
heads          : what the head of a request says
proxies        : who a client is behind a proxy
server         : the listening socket, and the server that accepts connections on the socket
streamed       : bodies that are taken as they arrive
turns          : turns of reading
"""
