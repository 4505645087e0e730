"""One colour and marker for each policy on every page."""

COLOURS = {
    "smdp": "#d55e00",
    "greedy": "#0072b2",
    "static 8": "#009e73",
    "static 16": "#cc79a7",
    "static 32": "#555555",
    "ad hoc": "#0072b2",  # the greedy policy
    "largest batch": "#555555",
    "rate": "#e69f00",
    "rate repaired": "#f5d58a",
}
MARKERS = {"smdp": "o", "greedy": "^", "static 8": "s", "static 16": "D", "static 32": "v"}
LABELS = {name: name for name in MARKERS} | {"smdp": "SMDP"}
