"""Run the phases of an LLM box one after the other, and prove between each two that the machine is clean."""

__version__ = "0.1.0"
