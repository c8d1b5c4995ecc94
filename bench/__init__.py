"""The benchmark: how fast the observers are and what they lose, beside llm-compressor. `make bench` runs it."""
