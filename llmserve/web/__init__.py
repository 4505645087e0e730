"""The server's own endpoints: state, administration and the page.

admin    : endpoints for operators
browsers : what web pages may do on a server without keys
cors     : cross-origin requests
page     : the page for people
state    : the state of the server
"""
