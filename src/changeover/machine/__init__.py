"""The only code that touches the operating system: processes, GPUs, ports, shared memory, clock.

Standard library and nvidia-ml-py only, so that it can travel to another box as one zipapp.
It reads and acts; it decides nothing and promises nothing about ownership (see ``changeover.teardown``).
"""
