"""The questions of docs/results: a folder for each page, with what measures it."""
