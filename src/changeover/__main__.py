"""``python -m changeover``."""

from changeover.cli.main import main

main()
