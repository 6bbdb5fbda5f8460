"""A dataset of captured hidden states: layer conventions, the store, collection from a server, verification.

A sample in it is complete and hashed, or absent. It does not judge what the states are good for.
"""
