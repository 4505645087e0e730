"""The server: its parts are opened, changed and closed here.

parts   : the features of the server, in the order in which they are checked and opened
reload  : reads the settings again while the server runs: all parts of the server take them, or none does
serving : opens the parts of a server, and closes them
"""
