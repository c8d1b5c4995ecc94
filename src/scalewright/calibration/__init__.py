"""How data reaches observers."""
