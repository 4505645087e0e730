"""Order: which formed batch runs next. An order is a key; the smallest key runs first."""
