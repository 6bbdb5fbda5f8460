"""Stopping what is ours and proving the machine clean: ownership, stages, verification, clearance.

Standard library and nvidia-ml-py only. It never signals a process that it cannot prove to be ours.
"""
