"""`python -m scalewright` is the command line."""

from scalewright.cli import main

main()
