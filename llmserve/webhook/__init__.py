"""A webhook: a receiver of the operator's is told by POST of each batch job that has ended.

part   : the receiver's settings, and who tells this room that a batch has ended
sender : sends the notices, again and again where the receiver does not take them
"""
