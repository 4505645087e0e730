"""Are an engine's slots learnt from its answers alone, without a loss? docs/results/slots.md.

engine : an engine of unknown slots in virtual time, with what a learner sees of it
run    : random engines, each with its slots known and learnt
light  : an engine that is hardly used, with a long prompt now and then
"""
