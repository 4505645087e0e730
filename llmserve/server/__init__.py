"""The server: its parts are started, reloaded and ended here.

reload : keys, limits, weights, budgets, engines by URL and plans are read again while the server runs
start  : starts the parts of a server
"""
