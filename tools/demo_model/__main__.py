"""`python -m tools.demo_model` runs all stages."""

from .make import main

main()
