"""What is wrong or slow, in plain words.

config  : what is wrong or slow in a configuration, and in the engines by URL that it names
finding : a finding: its level, what is so, and the remedy
running : what is wrong or slow in a running server, by its metrics
"""
