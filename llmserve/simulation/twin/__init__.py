"""The twin: the very scheduler, driven through the requests of a journal under other settings.

choice : which candidate a twin would take, and why
past   : what a server has just served, from the steps of its journal
replay : a recording under other settings
speed  : how fast an engine is, fitted to its answers
"""
