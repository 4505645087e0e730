"""What is wrong or slow, in plain words.

config  : what is wrong or slow in a configuration, and in the engines by URL that it names
finding : what `llmserve doctor` finds
running : what is wrong or slow in a running server, by its metrics
"""
