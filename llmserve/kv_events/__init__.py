"""KV events: what engines tell of their prefix caches as these change (vLLM's and SGLang's `--kv-events-config`).

part : which engines' KV events are followed, by the settings
"""
